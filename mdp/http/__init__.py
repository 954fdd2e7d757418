"""An HTTP server for an ASGI application that strangers may connect to: uvicorn, with limits and timeouts of its own.

The HTTP gateway and the dashboards run on it.  It needs the extra `web`.

    server.py        accepts connections, and stops in an orderly way
    connection.py    one connection, before there is a request: an `asyncio.Protocol` around uvicorn's
    connections.py   all of them, and which must go when there are too many
    frames.py        how much of a WebSocket's message has arrived
    guard.py         requests: ASGI middleware
    checks.py        what a request must not be
    problems.py      errors as problem documents (RFC 9457)
    limits.py        the limits
"""
