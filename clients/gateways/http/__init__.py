"""The HTTP gateway (docs/how-to/gateways.md): an ASGI application on uvicorn.

Requests to services bypass the framework and set neither timers nor tasks of their own, because they are what the
gateway is for; everything else is a route of Starlette.
"""
