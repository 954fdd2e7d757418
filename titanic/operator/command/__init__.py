"""The command `titanic`."""
