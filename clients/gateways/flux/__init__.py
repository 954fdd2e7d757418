"""The Flux gateway: Flux programs reach services, and offer some, through a UNIX socket.

messages.py, framing.py, payloads.py    the protocol, pure: bytes ↔ messages
bodies.py, errors.py                    payloads ↔ bodies, errno ↔ errors
session.py                              one connection, pure: what becomes of its requests
programs.py, subscriptions.py           … of the services that it offers, and of its subscriptions
writer.py                               what it writes
instance.py                             what all connections share
topology.py, attributes.py              the tree of brokers as ranks, and what Flux asks about a rank
events.py, departures.py                what gateways tell each other: events, and who has left
server.py, cli.py                       the socket and the tasks; the command
"""
