"""How many requests a worker asks for, as pure functions of what its handlers took."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.workers.session.held import MAX_PREFETCH, PREFETCH_SECONDS, CreditController

pytestmark = pytest.mark.unit

SHORT = 0.00001
seconds = st.floats(0.0, 10.0)


def after(controller, *durations):
    """The credit after handlers that took so long."""
    for each in durations:
        controller.finished(each)
    return controller.credit


def test_without_prefetch_the_time_that_handlers_take_does_not_matter():
    controller = CreditController(3)
    assert not controller.finished(SHORT)
    assert not controller.requests_may_wait(10, 3)
    assert (controller.credit, controller.handlers_are_short) == (3, False)


# ── handlers that block a thread ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_held_ahead_before_handlers_have_proved_short():
    controller = CreditController(4, prefetch=True)
    assert controller.credit == 4
    assert not controller.handlers_are_short
    assert after(controller, SHORT) == 4


def test_short_handlers_get_more_and_more_ahead():
    controller = CreditController(1, prefetch=True)
    seen = [after(controller, SHORT) for _ in range(2000)]
    assert seen == sorted(seen)
    assert all(after <= 2 * before for before, after in pairwise(seen))
    assert seen[:5] == [1] * 5
    assert 0 <= 1 + PREFETCH_SECONDS / SHORT - seen[-1] <= 1.01
    assert controller.handlers_are_short


def test_at_most_a_millisecond_of_work_is_held_ahead():
    assert after(CreditController(1, prefetch=True), *[PREFETCH_SECONDS / 10.5] * 2000) == 1 + 10
    assert after(CreditController(1, prefetch=True), *[0.0] * 9999) == 1 + MAX_PREFETCH
    assert after(CreditController(2, prefetch=True), *[2 * PREFETCH_SECONDS] * 2000) == 2


def test_a_slow_handler_ends_it_at_once():
    controller = CreditController(2, prefetch=True)
    after(controller, *[SHORT] * 2000)
    controller.slow()
    assert (controller.credit, controller.handlers_are_short) == (2, False)
    assert after(controller, SHORT) == 2  # and one short one proves nothing


def test_handlers_that_become_slower_get_less_ahead():
    controller = CreditController(1, prefetch=True)
    after(controller, *[SHORT] * 2000)
    assert after(controller, *[10 * PREFETCH_SECONDS] * 20) == 1


def test_slow_ones_among_short_ones_keep_it_low():
    """Every twentieth handler is slow, as in the benchmark of the tail."""
    controller, most = CreditController(1, prefetch=True), 0
    for _ in range(200):
        most = max(most, after(controller, *[SHORT] * 19))
        controller.slow()
        controller.finished(0.02)
    assert most <= 9


def test_a_change_of_the_credit_is_told():
    controller = CreditController(1, prefetch=True)
    for _ in range(2000):
        before = controller.credit
        assert controller.finished(SHORT) == (controller.credit != before)
    assert controller.finished(SHORT) is False  # it does not change with every request


def test_when_requests_wait_for_a_handler_that_might_be_slow():
    controller = CreditController(2, prefetch=True)
    assert not controller.requests_may_wait(0, 2)
    assert not controller.requests_may_wait(1, 1)  # another thread can begin it
    assert controller.requests_may_wait(1, 2)
    assert not controller.requests_may_wait(0, 5)
    after(controller, *[SHORT] * 100)
    assert controller.requests_may_wait(0, 1)  # the broker may send more at any time
    controller.slow()
    assert not controller.requests_may_wait(0, 1)


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(st.one_of(seconds, st.just(SHORT), st.just(None)), max_size=200))
def test_the_credit_of_blocking_handlers_has_bounds(concurrency, durations):
    controller = CreditController(concurrency, prefetch=True)
    for each in durations:
        if each is None:
            controller.slow()
        else:
            controller.finished(each)
        assert concurrency <= controller.credit <= concurrency + MAX_PREFETCH
