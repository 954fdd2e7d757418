"""The command `mdclient`."""
