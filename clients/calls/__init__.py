"""A call, whatever its dialect: arguments and settings, retries, the reply, the dialog that carries it."""
