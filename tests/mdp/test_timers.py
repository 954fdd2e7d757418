"""Due times: never early, at most a grain late, cleared without a scan; alarms, which know what is due next."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmdp.mdp.timers import MAX_STALE_NUMBERS, Alarms, TimerNode, Timers

GRAIN = 0.5


NAMES = {}
"""What is compiled takes no attributes and no subclasses."""


def named(name):
    thing = TimerNode()
    NAMES[thing] = name
    return thing


def timers_with(**due):
    """Timers and the things in them, by name."""
    timers = Timers(GRAIN)
    things = {name: named(name) for name in due}
    for name, thing in things.items():
        timers.set(thing, due[name])
    return timers, things


def due_names(timers, now):
    return [NAMES[thing] for thing in timers.pop_due(now)]


def test_buckets_fire_in_order_of_time_and_timers_in_order_of_setting():
    timers, _ = timers_with(late=7, first=1.1, second=1.0, early=0.2)
    assert due_names(timers, 9) == ["early", "first", "second", "late"]


def test_a_cleared_timer_does_not_fire():
    timers, things = timers_with(a=1, b=1, c=2)
    timers.clear(things["a"])
    assert due_names(timers, 9) == ["b", "c"]


def test_a_due_timer_can_be_cleared_while_others_fire():
    timers, things = timers_with(a=1, b=1, c=1)
    seen = []
    for thing in timers.pop_due(9):
        seen.append(NAMES[thing])
        timers.clear(things["b"])
    assert seen == ["a", "c"]


def test_a_due_timer_can_be_set_again_while_others_fire():
    timers, things = timers_with(a=1, b=1)
    seen = []
    for thing in timers.pop_due(5):
        seen.append(NAMES[thing])
        if thing is things["a"]:
            timers.set(thing, 6)
            timers.clear(things["b"])
            timers.set(things["b"], 7)
    assert seen == ["a"]
    assert due_names(timers, 9) == ["a", "b"]


def test_a_timer_set_again_in_the_past_fires_again():
    timers, _ = timers_with(a=1)
    seen = []
    for thing in timers.pop_due(5):
        seen.append(NAMES[thing])
        if len(seen) < 3:
            timers.set(thing, 1)
    assert seen == ["a", "a", "a"]


def test_cleared_timers_leave_nothing_behind():
    # times may be years off: what is kept must not grow until then
    timers, things = timers_with(a=1, b=50_000.25)
    for number in range(10_000):
        timers.clear(things["a"])
        timers.set(things["a"], 2 + number)
        timers.clear(things["a"])
        assert len(timers._order) <= 2 * len(timers._buckets) + MAX_STALE_NUMBERS + 1
    assert len(timers._buckets) == 1
    assert timers.next_due() == 50_000.5
    assert due_names(timers, 60_000) == ["b"]
    assert timers.next_due() is None


@settings(deadline=None)
@given(
    grain=st.floats(0.0005, 60),
    dues=st.lists(st.floats(0, 1e7), min_size=1, max_size=20),
    times=st.lists(st.floats(0, 1e7), max_size=5),
)
def test_never_early_and_at_most_one_resolution_late(grain, dues, times):
    timers = Timers(grain)
    waiting = {TimerNode(): due for due in dues}
    for thing, due in waiting.items():
        timers.set(thing, due)
    for now in [*sorted(times), 2e7]:
        for thing in timers.pop_due(now):
            assert waiting.pop(thing) <= now
        assert all(now < due + grain * 1.001 for due in waiting.values())
        assert (timers.next_due() is None) == (not waiting)


def test_due_timers_stay_if_the_caller_stops_iterating():
    timers = Timers(1.0)
    first, second = TimerNode(), TimerNode()
    timers.set(first, 0.5)
    timers.set(second, 0.5)
    assert next(timers.pop_due(2.0)) is first
    assert timers.next_due() == 1.0
    assert list(timers.pop_due(2.0)) == [second]
    assert timers.next_due() is None


# ── alarms ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TIME = st.integers(0, 20)


@example(steps=[("set", 5), ("clear", 0), ("set", 10)])
@given(steps=st.lists(st.tuples(st.sampled_from(["set", "clear", "pop"]), TIME), max_size=30))
def test_the_alarm_of_timers_is_never_late(steps):
    """It may be early after something was cleared, until that time has come; it is off if nothing is left."""
    timers, alarms, waiting = Timers(1.0), Alarms(), {}
    alarm = timers.alarm = alarms.add()
    for step, time in steps:
        if step == "set":
            node = TimerNode()
            waiting[node] = time + 1  # the end of its bucket
            timers.set(node, time)
        elif step == "clear" and waiting:
            node = list(waiting)[time % len(waiting)]
            del waiting[node]
            timers.clear(node)
        elif step == "pop":
            for node in timers.pop_due(time):
                del waiting[node]
            assert alarm.due == min(waiting.values(), default=math.inf)
        assert alarm.due <= min(waiting.values(), default=math.inf)
        assert waiting or alarm.due == math.inf


@given(moves=st.lists(st.tuples(st.integers(0, 2), st.one_of(TIME, st.just(math.inf))), max_size=20))
def test_alarms_know_which_is_next(moves):
    alarms = Alarms()
    some = [alarms.add() for _ in range(3)]
    for number, due in moves:
        some[number].set(due)
        assert alarms.due == min(each.due for each in some)


def test_what_is_due_is_done_in_order():
    alarms, done = Alarms(), []

    def doing(name):
        def action(now):
            done.append((name, now))
            made[name].set(math.inf)

        return action

    made = {name: alarms.add(doing(name)) for name in ("first", "second", "third")}
    made["third"].set(1.0)
    made["first"].set(2.0)
    made["second"].set(3.0)
    alarms.run(2.0)
    assert done == [("first", 2.0), ("third", 2.0)]
    assert alarms.due == 3.0
