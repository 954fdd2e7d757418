"""An HTTP server for an ASGI application that strangers may connect to: uvicorn, with limits and timeouts of its own.

The HTTP gateway and the dashboards run on it.  It needs the extra `web`.
"""
