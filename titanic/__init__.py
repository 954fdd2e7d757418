"""Requests that outlive everyone: `Titanic` keeps them, and their replies, in SQL (RFC 9)."""

from ..mdp.errors import TitanicError, UnknownTicket
from .client import AsyncTicket, AsyncTitanic, Ticket, Titanic, enqueue

__all__ = ["AsyncTicket", "AsyncTitanic", "Ticket", "Titanic", "TitanicError", "UnknownTicket", "enqueue"]
