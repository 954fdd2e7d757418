"""zmdp: a service broker for Python teams, speaking ZeroMQ's Majordomo protocol.

Programs import what they need from one folder of the product:

- `zmdp.clients`: call services (`Client`)
- `zmdp.workers`: offer services (`Worker`)
- `zmdp.mdp`: the broker itself, its limits and the errors
"""

from .pure import PURE, prefer_sources

__version__ = "0.1.0"
if PURE:
    prefer_sources()
