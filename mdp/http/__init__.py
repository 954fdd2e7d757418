"""An HTTP server for an ASGI application: uvicorn by its public settings, and one ASGI middleware.

The HTTP gateway and the dashboards run on it.  It needs the extra `web`.  On an open network, a reverse proxy stands in
front (deploy/nginx, deploy/caddy), which ends connections that are idle or slow before there is a request.
"""
