"""The HTTP gateway (docs/how-to/gateways.md): an ASGI application on uvicorn.

Requests to services bypass the framework and set neither timers nor tasks of their own, because they are what the
gateway is for; everything else is a route of Starlette.

    translation.py    HTTP requests ↔ requests to services
    problems.py       exceptions → problem documents
    access.py         tokens ↔ roles; token_cli.py makes tokens
    gateway.py        what all parts share: who calls, and how much may be outstanding
    app.py            POST /services/NAME, and the routes
    accept.py         which type a reply has
    stream.py         replies as server-sent events, or as lines of JSON
    rows.py           streams of values as a JSON array or CSV
    jobs.py           requests that Titanic stores
    openapi.py        the OpenAPI document
    server.py         runs the gateway; the HTTP server itself is mdp/http
    settings.py       the settings; cli.py has an option for each
"""
