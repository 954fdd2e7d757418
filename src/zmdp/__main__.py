"""`python -m zmdp` is the command `zmdp`."""

from .entry_points import zmdp

zmdp()
