"""An HTTP server for an ASGI application: uvicorn by its public settings, and one ASGI middleware.

The HTTP gateway and the dashboards run on it.  It needs the extra `web`.  Strangers meet the reverse proxy in front
(deploy/nginx, deploy/caddy), which ends connections that are idle or slow before there is a request.

    server.py      runs uvicorn, and stops it in an orderly way
    guard.py       the middleware: size, time and memory of bodies
    checks.py      what a request must not be
    problems.py    errors as problem documents (RFC 9457)
    limits.py      the limits
"""
