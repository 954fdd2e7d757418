"""Requests as a worker gets them, without a broker."""

import json

from zmdp.mdp import wire
from zmdp.workers import Request


def request_by(user="", *, admin=False):
    """Return a request whose sender has this role."""
    options = {"user": user, "admin": admin} if user else {}
    return Request([], service="service", client=b"client", options=wire.Options(json.dumps(options).encode()))
