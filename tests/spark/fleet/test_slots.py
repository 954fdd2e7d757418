"""The slots of a fleet, without Spark, sockets or time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.mdp.backoff import EARLY_DEATH_SECONDS, RESTART_SECONDS
from zmdp.spark.fleet.slots import Died, Lease, Load, Refused, Served, Slots

LEASE, IDLE = 30.0, 60.0


def slots(minimum=1, maximum=4, **settings):
    return Slots(minimum, maximum, **{"lease": LEASE, "idle": IDLE, "rng": random.Random(1), **settings})


def a_report(**more):
    return {"host": "h", "pid": 7, "executor": "0", "served": 0, "registered": True, **more}


def serving(fleet, now=0.0):
    """Start the due leases and let them report."""
    leases = fleet.due(now)
    for lease in leases:
        assert fleet.report(lease.slot, lease.number, a_report(), now) is False
    return leases


def states(fleet):
    return [row["state"] for row in fleet.rows()]


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_slot_gets_a_lease_of_varied_length():
    fleet = slots(minimum=3)
    leases = fleet.due(0.0)
    assert [(lease.slot, lease.number) for lease in leases] == [(0, 1), (1, 2), (2, 3)]
    assert all(0.8 * LEASE <= lease.seconds <= 1.2 * LEASE for lease in leases)
    assert len({lease.seconds for lease in leases}) == 3  # they do not end together
    assert fleet.due(100.0) == []


def test_an_ended_lease_is_renewed_at_once():
    fleet = slots()
    (lease,) = serving(fleet)
    fleet.report(lease.slot, lease.number, a_report(served=10), 29.0)
    fleet.ended(lease, Served(12), 30.0)
    assert [(each.slot, each.number) for each in fleet.due(30.0)] == [(0, 2)]
    assert fleet.rows()[0]["served"] == 12
    assert fleet.failures == 0


def test_a_dead_lease_is_restarted_at_once_and_then_after_pauses():
    fleet = slots()
    now, pauses = 0.0, []
    for _ in range(9):
        (lease,) = serving(fleet, now)
        now += EARLY_DEATH_SECONDS / 2
        fleet.ended(lease, Died("killed"), now)
        pauses.append((fleet.deadline() or now) - now)
        now = fleet.deadline() or now
    assert pauses[0] == 0.0
    for pause, full in zip(pauses[1:], [1, 2, 4, 8, 16, 32, 32, 32], strict=True):
        assert 0.8 * full <= pause <= full
    assert fleet.failures == 9
    assert fleet.last_error == "killed"


def test_a_refusing_executor_is_retried_after_pauses():
    fleet = slots()
    (lease,) = fleet.due(0.0)
    fleet.ended(lease, Refused("no pyzmq"), 1.0)
    assert states(fleet) == ["waiting"]
    assert fleet.due(1.0) == []
    now = fleet.deadline()
    assert 1.8 <= now <= 2.0
    (lease,) = fleet.due(now)
    fleet.ended(lease, Refused("no pyzmq"), now)
    assert fleet.deadline() >= now + 1.6
    (lease,) = serving(fleet, fleet.deadline())
    fleet.ended(lease, Served(0), 40.0)
    assert fleet.deadline() == 40.0
    assert fleet.failures == 2


def test_late_reports_of_a_lost_lease_are_answered_with_drain():
    fleet = slots()
    (lost,) = serving(fleet)
    fleet.ended(lost, Died("executor lost"), 1.0)
    assert fleet.report(lost.slot, lost.number, a_report(), 2.0) is True
    (lease,) = fleet.due(2.0)
    assert fleet.report(lost.slot, lost.number, a_report(pid=8), 2.0) is True
    assert fleet.report(lease.slot, lease.number, a_report(pid=9), 2.0) is False
    assert fleet.rows()[0]["pid"] == 9
    assert fleet.report(17, 1, a_report(), 2.0) is True


def test_an_invalid_report_counts_nothing():
    fleet = slots()
    (lease,) = serving(fleet)
    fleet.report(lease.slot, lease.number, {"served": "many", "concurrency": 0}, 1.0)
    assert fleet.rows()[0]["served"] == 0
    assert fleet.concurrency == 1


# ── draining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_draining_tells_each_task_and_waits_for_all():
    fleet = slots(minimum=2)
    one, other = serving(fleet)
    fleet.drain()
    assert not fleet.finished
    assert fleet.due(1.0) == []
    assert fleet.report(one.slot, one.number, a_report(), 1.0) is True
    assert states(fleet) == ["draining", "draining"]
    fleet.ended(one, Served(1), 2.0)
    assert fleet.due(2.0) == []
    assert not fleet.finished
    assert fleet.ended(other, Died("killed meanwhile"), 3.0) is False
    assert fleet.finished
    assert fleet.failures == 0
    assert fleet.rows() == []


def test_rows_tell_since_when_a_slot_is_in_its_state():
    fleet = slots()
    (lease,) = fleet.due(1.0)
    assert fleet.rows(epoch=1000.0)[0]["since"] == 1001.0
    for now in (3.0, 4.0):
        fleet.report(lease.slot, lease.number, a_report(), now)
    assert fleet.rows(epoch=1000.0)[0]["since"] == 1003.0


def test_draining_does_not_wait_for_pausing_slots():
    fleet = slots()
    (lease,) = fleet.due(0.0)
    fleet.ended(lease, Refused("no"), 0.0)
    fleet.drain()
    assert fleet.finished
    assert fleet.rows() == []


def test_a_lease_of_a_draining_slot_that_has_not_reported_is_unwanted():
    fleet = slots(minimum=2)
    one, other = fleet.due(0.0)
    fleet.report(one.slot, one.number, a_report(), 0.0)
    assert fleet.unwanted() == []
    fleet.drain()
    assert fleet.unwanted() == [other.number]


def test_silent_slots_are_listed():
    fleet = slots(minimum=2)
    one, other = fleet.due(0.0)
    fleet.report(one.slot, one.number, a_report(), 1.0)
    assert fleet.silent(14.0, 15.0) == []
    assert fleet.silent(15.0, 15.0) == [(1, other.number)]


# ── how many ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def busy(queued=0, idle=0, workers=1, dispatched=0, running=None):
    """Return a load in which each worker holds one request, or all together `running`."""
    held = workers - idle if running is None else running
    return Load(queued=queued, workers=workers, idle=idle, running=held, dispatched=dispatched)


def test_the_load_that_a_broker_reports():
    row = {"queued": 1, "workers": 2, "idle": 3, "running": 9, "dispatched": 5}
    assert Load.from_row(row) == Load(1, 2, 3, 9, 5)
    assert Load.from_row(row | {"remote_running": 4}) == Load(1, 2, 3, 5, 5)  # other brokers' workers are no slots
    assert Load.from_row({}) == Load()


def test_a_lasting_queue_doubles_the_slots():
    fleet = slots(maximum=6)
    serving(fleet)
    fleet.observe(busy(queued=100), 0.0)
    assert fleet.wanted == 1  # perhaps it is gone at once
    fleet.observe(busy(queued=100), 0.5)
    assert fleet.wanted == 2
    fleet.observe(busy(queued=100), 1.0)
    assert fleet.wanted == 2  # the second does not serve yet
    serving(fleet)
    for now in (1.5, 2.0, 2.5):
        fleet.observe(busy(queued=100, workers=2), now)
        serving(fleet)
    assert fleet.wanted == 6


def test_a_short_queue_adds_at_most_one_slot_per_request():
    fleet = slots(minimum=3, maximum=10)
    serving(fleet)
    fleet.observe(busy(queued=1, workers=3), 0.0)
    fleet.observe(busy(queued=1, workers=3), 0.5)
    assert fleet.wanted == 4


def test_no_slots_are_added_while_one_fails():
    fleet = slots()
    (lease,) = fleet.due(0.0)
    fleet.ended(lease, Refused("no handler"), 0.0)
    for now in range(10):
        fleet.observe(busy(queued=100, workers=0), float(now))
    assert fleet.wanted == 1


def test_an_empty_fleet_scales_up_and_back_to_zero():
    fleet = slots(minimum=0)
    assert fleet.due(0.0) == []
    fleet.observe(busy(workers=0), 0.0)
    assert fleet.due(0.0) == []
    fleet.observe(busy(workers=0, queued=1), 0.5)
    (lease,) = serving(fleet, 0.5)
    fleet.observe(busy(idle=1), 1.0)
    fleet.observe(busy(idle=1), 1.0 + IDLE - 0.1)
    assert fleet.wanted == 1
    fleet.observe(busy(idle=1), 1.0 + IDLE)
    assert fleet.wanted == 0
    assert fleet.due(62.0) == []
    assert fleet.report(lease.slot, lease.number, a_report(), 62.0) is True
    fleet.ended(lease, Served(1), 63.0)
    assert fleet.rows() == []


def test_requests_shorter_than_the_polling_interval_keep_a_slot():
    fleet = slots(minimum=0)
    fleet.observe(busy(workers=0, queued=1), 0.0)
    serving(fleet)
    for now in range(200):
        fleet.observe(busy(idle=1, dispatched=now), float(now))
    assert fleet.wanted == 1


def test_only_unneeded_slots_are_released():
    fleet = slots(minimum=1, maximum=4)
    fleet.wanted = 4
    serving(fleet)
    fleet.observe(busy(workers=4, idle=3), 0.0)
    fleet.observe(busy(workers=4, idle=2), 30.0)
    fleet.observe(busy(workers=4, idle=3), IDLE)
    assert fleet.wanted == 2
    assert fleet.due(IDLE) == []
    assert states(fleet) == ["serving", "serving", "draining", "draining"]


@pytest.mark.parametrize(
    ("concurrency", "running", "needed"),
    [(1, 0, 1), (1, 2, 2), (1, 4, 4), (1, 40, 4), (8, 0, 1), (8, 8, 1), (8, 9, 2), (8, 40, 4)],
)
def test_slots_are_needed_while_they_hold_requests(concurrency, running, needed):
    """Also prefetched ones, when each could take another."""
    fleet = slots(minimum=1, maximum=4)
    fleet.wanted = 4
    for lease in fleet.due(0.0):
        fleet.report(lease.slot, lease.number, a_report(concurrency=concurrency), 0.0)
    fleet.observe(busy(workers=4, idle=4, running=running), 0.0)
    fleet.observe(busy(workers=4, idle=4, running=running), IDLE)
    assert fleet.wanted == needed


def test_the_idle_time_restarts_when_all_slots_are_needed_or_the_broker_is_away():
    for interruption in (busy(workers=2, idle=0), busy(workers=2, queued=1), None):
        fleet = slots(minimum=1, maximum=4)
        fleet.wanted = 2
        serving(fleet)
        fleet.observe(busy(workers=2, idle=2), 0.0)
        fleet.observe(interruption, 30.0)
        fleet.observe(busy(workers=2, idle=2), IDLE)
        assert fleet.wanted == 2


def test_workers_outside_the_fleet_are_not_counted():
    fleet = slots(minimum=1, maximum=4)
    fleet.wanted = 2
    serving(fleet)
    for now in (0.0, IDLE):
        fleet.observe(busy(workers=12, idle=4, dispatched=int(now)), now)  # ten elsewhere, eight of all are busy
    assert fleet.wanted == 1


def test_the_maximum_follows_the_number_of_cores():
    fleet = slots(minimum=1, maximum=1)
    serving(fleet)
    fleet.bound(3)
    for now in range(10):
        fleet.observe(busy(queued=9, workers=len(fleet.rows())), float(now))
        serving(fleet)
    assert fleet.wanted == 3
    fleet.bound(0)
    assert fleet.wanted == fleet.maximum == 1


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────────────────────────

loads = st.builds(Load, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)) | st.none()
outcomes = st.sampled_from([Served(1), Refused("no"), Died("killed")])
steps = st.lists(
    st.tuples(st.just("observe"), loads)
    | st.tuples(st.just("ended"), st.tuples(st.integers(0, 9), outcomes))
    | st.tuples(st.just("report"), st.integers(0, 9))
    | st.tuples(st.just("wait"), st.floats(0.1, 100.0)),
    max_size=60,
)


@given(steps)
def test_invariants_of_slots_and_leases(steps):
    fleet = slots(minimum=1, maximum=4)
    running: list[Lease] = []
    now = 0.0
    for what, value in steps:
        if what == "observe":
            fleet.observe(value, now)
        elif what == "wait":
            now += value
        elif running and what == "report":
            lease = running[value % len(running)]
            fleet.report(lease.slot, lease.number, a_report(), now)
        elif running and what == "ended":
            lease = running.pop(value[0] % len(running))
            fleet.ended(lease, value[1], now)
        drained = states(fleet).count("draining")
        surplus = max(0, len(fleet.rows()) - drained - fleet.wanted)
        for lease in fleet.due(now):
            assert lease.slot not in {each.slot for each in running}
            running.append(lease)
        active = [state for state in states(fleet) if state != "draining"]
        assert len(active) == fleet.wanted
        assert states(fleet).count("draining") <= drained + surplus
        assert 1 <= fleet.wanted <= 4
        assert fleet.deadline() is None or fleet.deadline() <= now + RESTART_SECONDS[1]
    fleet.drain()
    for lease in running:
        assert fleet.report(lease.slot, lease.number, a_report(), now)
        fleet.ended(lease, Served(0), now)
    assert fleet.finished
