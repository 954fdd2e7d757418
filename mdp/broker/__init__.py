"""The broker: the state machine, what it keeps, and the server that runs it."""
