"""Gateways: programs that let others in who do not speak ZeroMQ (docs/how-to/gateways.md).

A gateway is a client of the broker, and where its own protocol lets peers serve, a worker.  Connections that keep
state, those of Flux programs, have a `Machine` each, which turns bytes of their protocol into `effects` and back and
knows no socket and no clock.  `Conversation` carries the effects out.  A new gateway for such connections is a machine,
and a shell that accepts them.  HTTP requests, event streams and jobs have no machine: there is no state between one
request and the next.
"""
