"""Durable requests: `Titanic` keeps requests and their replies in SQL, so they survive any crash (RFC 9)."""

from ..mdp.errors import InvalidUUID, TitanicError, UnknownTicket
from .api.client import AsyncTicket, AsyncTitanic, Ticket, Titanic
from .api.schedule_client import Schedules
from .db.enqueue import enqueue

__all__ = [
    "AsyncTicket",
    "AsyncTitanic",
    "InvalidUUID",
    "Schedules",
    "Ticket",
    "Titanic",
    "TitanicError",
    "UnknownTicket",
    "enqueue",
]
