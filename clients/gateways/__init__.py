"""Gateways: programs that let others in who do not speak ZeroMQ (docs/gateways.md).

A gateway is a client of the broker, and where its own protocol lets peers serve, a worker.  What it decides, it decides
in a `Machine` per connection, which turns bytes of that protocol into `effects` and back and knows no socket and no
clock.  `Conversation` carries the effects out.  A new gateway is such a machine, and a shell that accepts connections.

    effects.py        what a machine asks for, and the machine's interface
    conversation.py   one connection: its machine, its requests at the broker, its limits
    upstream.py       the gateway's side towards the broker: a client, and a worker for each offered service
    cli.py            the command mdp-gateway
    http/, flux/      the gateways
"""
