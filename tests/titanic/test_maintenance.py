"""What maintenance does about requests that the database has and this Titanic does not know."""

import asyncio
from types import SimpleNamespace

from support.titanics import rooms_of

from zmdp.titanic import store


def test_requests_that_this_titanic_does_not_know_are_put_back():
    """But not while the answer to a transaction may make them known."""
    put_back = []

    class Writer:
        def submit(self, work, item):
            assert work is store.reschedule
            put_back.append(item.id)
            return SimpleNamespace(add_done_callback=lambda callback: None)

    async def scenario():
        loop = asyncio.get_running_loop()
        first, second = loop.create_future(), loop.create_future()
        rooms = rooms_of(Writer())
        rooms.acceptance._accepting = {first}
        for _ in range(3):
            rooms.maintenance._put_back_strays({7: 1, 8: 1})
        assert put_back == []
        rooms.acceptance._accepting = {second}  # it began after they were seen
        rooms.dispatcher._running[8] = None  # the answer to the first has made it known
        rooms.maintenance._put_back_strays({7: 1, 8: 1})
        assert put_back == [7]

    asyncio.run(scenario())
