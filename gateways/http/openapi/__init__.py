"""The gateway's description of itself, with the services that exist now: OpenAPI, and pages for people."""
