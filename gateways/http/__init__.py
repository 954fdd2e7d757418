"""The HTTP gateway (docs/how-to/gateways.md): an ASGI application on uvicorn.

`services` answers POST /services/NAME without a framework, because that is what the gateway is for.  `jobs` and
`openapi` are routes of Starlette.
"""
