"""The machine of one connection, in parts; it uses no socket and no clock."""
