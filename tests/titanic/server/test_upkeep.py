"""What maintenance does about requests that the database has and this Titanic does not know."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import pytest
from support.titanics import parts_of

from zmdp.titanic.db import store
from zmdp.titanic.server import upkeep as maintenance

NOW = 1_800_000_000.0
NOTHING = store.Findings(held={}, services={}, next_due=None, waiting=None)


@pytest.mark.parametrize(
    ("found", "pause"),
    [
        ({}, maintenance.MAINTENANCE_SECONDS),
        ({"next_due": NOW + 60}, maintenance.MAINTENANCE_SECONDS),
        ({"next_due": NOW + 0.25}, 0.25),
        ({"next_due": NOW - 60}, maintenance.LOCKED_SECONDS),  # somebody has locked it
        ({"next_due": NOW - 60, "more": True}, 0.0),
    ],
)
def test_the_pause_between_two_rounds(found, pause):
    assert maintenance.pause_after(replace(NOTHING, **found), NOW) == pause


def test_requests_that_this_titanic_does_not_know_are_put_back():
    """They were claimed in a transaction whose answer was lost."""
    put_back = []

    class Writer:
        def submit(self, work, item):
            assert work is store.reschedule
            put_back.append(item.id)
            return SimpleNamespace(add_done_callback=lambda callback: None)

    async def scenario():
        parts = parts_of(Writer())
        parts.dispatcher._running[8] = None
        parts.maintenance._apply(replace(NOTHING, held={7: 1, 8: 1}), {})
        assert put_back == [7]

    asyncio.run(scenario())


def test_a_request_that_is_closed_during_a_round_is_given_up_once():
    """Before it was sent to the broker: the close is committed with the round, which then does not find it either."""

    async def scenario():
        parts = parts_of()
        lane = parts.dispatcher.lane("echo")
        closed, other = (
            store.Claimed(number, uuid4(), "echo", "me", 1, 0, 0, 0, None, None, b"body", "") for number in (7, 8)
        )
        for each in (closed, other):
            parts.dispatcher._add(lane, each)
        known = dict(parts.dispatcher.running)
        parts.dispatcher.closed(closed.id)
        parts.maintenance._apply(replace(NOTHING, held={other.id: 1}), known)
        assert [each.claimed for each in lane.buffer] == [other]
        parts.maintenance._apply(NOTHING, dict(parts.dispatcher.running))  # the other one as well, by somebody else
        assert (parts.dispatcher.running, list(lane.buffer), parts.dispatcher._bytes) == ({}, [], 0)

    asyncio.run(scenario())
