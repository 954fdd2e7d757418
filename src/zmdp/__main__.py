"""`python -m zmdp` is the command `zmdp`."""

from .commands import zmdp

zmdp()
