"""Gateways: programs through which others that do not speak ZeroMQ reach services (docs/how-to/gateways.md).

A gateway is a client of the broker, and where its protocol lets peers offer services, a worker.  `http` and `mcp` are
here, with the limits and the access control that they share; `zmdp.interop.flux` is beside MDP.
"""
