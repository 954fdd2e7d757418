"""Which services do not answer, and when rows are sent to them again."""

import asyncio

from zmdp.clients.rows.availability import RECHECK_SECONDS, Availability
from zmdp.mdp.errors import RequestTimeout, ServiceNotFound


class BusyBroker:
    """A client of a broker that takes two seconds to answer."""

    async def available(self, service, *, timeout):
        if timeout < 2:
            raise RequestTimeout(f"no answer within {timeout} s", service=service)
        return True


def test_a_broker_that_is_busy_is_waited_for_before_rows_fail():
    async def check():
        availability = Availability(BusyBroker(), 60.0, asyncio.get_running_loop())
        error = ServiceNotFound("nobody", service="up")
        availability.not_found("up", error)
        assert await availability.check(["up"]) is error
        availability._missing["up"].until -= RECHECK_SECONDS
        assert await availability.check(["up"]) is None
        assert not availability

    asyncio.run(check())
