"""The broker: its machine, which puts the rooms together."""
