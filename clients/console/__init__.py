"""What commands that call services share: their options, bodies, and completion."""
