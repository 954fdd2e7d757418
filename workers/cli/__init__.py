"""The command `mdworker`."""
