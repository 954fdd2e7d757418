"""The command `zmdp dev`: everything that serves your functions, in one terminal."""
