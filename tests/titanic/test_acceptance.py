"""Rows that wait for their turn to be stored.  `test_packs.py` has more, over real sockets."""

import asyncio

from support.processes import TIMEOUT_SECONDS
from support.titanics import rooms_of


def test_rows_that_get_their_turn_as_their_caller_goes_away_leave_their_place():
    async def scenario():
        rooms = rooms_of()
        rooms.dispatcher.offer({"up": 1})
        lane = rooms.dispatcher.lane("up")
        lane.held = lane.room
        first = asyncio.ensure_future(rooms.acceptance._turn("up", 5, TIMEOUT_SECONDS))
        second = asyncio.ensure_future(rooms.acceptance._turn("up", 7, TIMEOUT_SECONDS))
        await asyncio.sleep(0)  # both wait
        lane.held = 0
        rooms.dispatcher.fill(lane)
        first.cancel()
        assert await second is lane
        assert lane.held == 7

    asyncio.run(scenario())
