"""Titanic's SQL: statements as functions of a connection and a batch, in the caller's transaction.

The functions do not commit.  Times are arguments, in seconds since 1970.  `maintain` gets a clock instead, and reads it
within the transaction, because a busy database may begin that much later.
"""

from .acceptance import accept
from .claims import Claim, Claimed, Clock, Lease, Turns, claim
from .counts import count_waiting
from .outcomes import Outcome, Partial, Reschedule, add_partials, finish, release, reschedule
from .replies import (
    Fetched,
    Lookup,
    PartialsQuery,
    Progress,
    close,
    fetch,
    fetch_partials,
    fetch_reply,
    fetch_request,
    progress,
)
from .schedules import (
    Declared,
    Edit,
    Edited,
    Fired,
    Firing,
    Listing,
    catch_up,
    declare_service_schedules,
    edit_schedules,
    fire,
    list_schedules,
    next_occurrence,
)
from .upkeep import Findings, MaintenanceRound, maintain, pending_after, pending_services, set_clock

__all__ = [
    "Claim", "Claimed", "Clock", "Declared", "Edit", "Edited", "Fetched", "Findings", "Fired", "Firing",
    "Lease", "Listing", "Lookup", "MaintenanceRound", "Outcome", "Partial", "PartialsQuery", "Progress", "Reschedule",
    "Turns",
    "accept", "add_partials", "catch_up", "claim", "close", "count_waiting",
    "declare_service_schedules", "edit_schedules", "fetch", "fetch_partials", "fetch_reply", "fetch_request", "finish",
    "fire", "list_schedules", "maintain", "next_occurrence", "pending_after", "pending_services", "progress", "release",
    "reschedule", "set_clock",
]  # fmt: skip
