"""The HTTP gateway (docs/how-to/gateways.md): an ASGI application on uvicorn.

Requests to services bypass the framework, because they are what the gateway is for; everything else is a route of
Starlette.
"""
