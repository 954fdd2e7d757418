"""How many requests a worker asks for, as pure functions of what its handlers took."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.workers.capacity import (
    AHEAD,
    LONG_STEP,
    MOST_AHEAD,
    QUICK_STEPS,
    Capacity,
)

SHORT = 0.00001
seconds = st.floats(0.0, 10.0)


def after(capacity, *durations):
    """The credit after handlers that took so long."""
    for each in durations:
        capacity.finished(each)
    return capacity.credit


def test_without_prefetch_the_time_that_handlers_take_does_not_matter():
    capacity = Capacity(3)
    assert not capacity.finished(SHORT)
    assert not capacity.ahead(10, 3)
    assert (capacity.credit, capacity.short) == (3, False)


# ── handlers that block a thread ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_held_ahead_before_handlers_have_proved_short():
    capacity = Capacity(4, prefetch=True)
    assert capacity.credit == 4
    assert not capacity.short
    assert after(capacity, SHORT) == 4


def test_short_handlers_get_more_and_more_ahead():
    capacity = Capacity(1, prefetch=True)
    seen = [after(capacity, SHORT) for _ in range(2000)]
    assert seen == sorted(seen)
    assert all(after <= 2 * before for before, after in pairwise(seen))
    assert seen[:5] == [1] * 5
    assert 0 <= 1 + AHEAD / SHORT - seen[-1] <= 1.01
    assert capacity.short


def test_at_most_a_millisecond_of_work_is_held_ahead():
    assert after(Capacity(1, prefetch=True), *[AHEAD / 10.5] * 2000) == 1 + 10
    assert after(Capacity(1, prefetch=True), *[0.0] * 9999) == 1 + MOST_AHEAD
    assert after(Capacity(2, prefetch=True), *[2 * AHEAD] * 2000) == 2


def test_a_slow_handler_ends_it_at_once():
    capacity = Capacity(2, prefetch=True)
    after(capacity, *[SHORT] * 2000)
    capacity.slow()
    assert (capacity.credit, capacity.short) == (2, False)
    assert after(capacity, SHORT) == 2  # and one short one proves nothing


def test_handlers_that_become_slower_get_less_ahead():
    capacity = Capacity(1, prefetch=True)
    after(capacity, *[SHORT] * 2000)
    assert after(capacity, *[10 * AHEAD] * 20) == 1


def test_slow_ones_among_short_ones_keep_it_low():
    """Every twentieth handler is slow, as in the benchmark of the tail."""
    capacity, most = Capacity(1, prefetch=True), 0
    for _ in range(200):
        most = max(most, after(capacity, *[SHORT] * 19))
        capacity.slow()
        capacity.finished(0.02)
    assert most <= 9


def test_a_change_of_the_credit_is_told():
    capacity = Capacity(1, prefetch=True)
    for _ in range(2000):
        before = capacity.credit
        assert capacity.finished(SHORT) == (capacity.credit != before)
    assert capacity.finished(SHORT) is False  # it does not change with every request


def test_when_requests_wait_for_a_handler_that_might_be_slow():
    capacity = Capacity(2, prefetch=True)
    assert not capacity.ahead(0, 2)
    assert not capacity.ahead(1, 1)  # another thread can begin it
    assert capacity.ahead(1, 2)
    assert not capacity.ahead(0, 5)
    after(capacity, *[SHORT] * 100)
    assert capacity.ahead(0, 1)  # the broker may send more at any time
    capacity.slow()
    assert not capacity.ahead(0, 1)


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(st.one_of(seconds, st.just(SHORT), st.just(None)), max_size=200))
def test_the_credit_of_blocking_handlers_has_bounds(parallel, durations):
    capacity = Capacity(parallel, prefetch=True)
    for each in durations:
        if each is None:
            capacity.slow()
        else:
            capacity.finished(each)
        assert parallel <= capacity.credit <= parallel + MOST_AHEAD


# ── handlers that await ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_handler_that_blocks_the_event_loop_shrinks_the_credit_down_to_one():
    capacity = Capacity(64)
    assert capacity.credit == 64
    assert not capacity.stepped(LONG_STEP / 2)
    seen = []
    while capacity.stepped(LONG_STEP):
        seen.append(capacity.credit)
    assert seen == [32, 16, 8, 4, 2, 1]


def test_it_grows_back_as_steps_are_quick():
    capacity = Capacity(10)
    capacity.stepped(1.0)
    for _ in range(QUICK_STEPS - 1):
        assert not capacity.stepped(SHORT)
    assert capacity.stepped(SHORT)
    assert capacity.credit == 10


def test_quick_steps_count_in_a_row():
    capacity = Capacity(8)
    for _ in range(QUICK_STEPS - 1):
        capacity.stepped(SHORT)
    capacity.stepped(1.0)
    for _ in range(QUICK_STEPS - 1):
        assert not capacity.stepped(SHORT)
    assert capacity.credit == 4


@settings(deadline=None)
@given(st.integers(1, 1000), st.lists(seconds, max_size=200))
def test_the_credit_of_awaiting_handlers_has_bounds(parallel, steps):
    capacity = Capacity(parallel)
    for each in steps:
        before = capacity.credit
        assert capacity.stepped(each) == (capacity.credit != before)
        assert 1 <= capacity.credit <= parallel
