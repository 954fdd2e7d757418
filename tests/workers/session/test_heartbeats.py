"""What a worker learns of its broker's heartbeats: C13, C35."""

import pytest

from zmdp.workers.session.heartbeats import Heartbeats

SECONDS = 60.0


class Wire:
    """A worker that does nothing but beat, beside a broker of some habits; a message takes `delay` seconds."""

    def __init__(self, *, liveness=5, own=None, offset=0.0, echo=False, delay=0.001):
        self.beats = Heartbeats(1.0, liveness)
        self.beats.connected(0.0)
        self.sent = []
        self.silent = False
        own_at = [] if own is None else [offset + own * (n + 1) for n in range(int(SECONDS / own))]
        answers, now = [], 0.0
        while now < SECONDS:
            now = min([self.beats.deadline(), *own_at[:1], *answers[:1]])
            if answers and answers[0] <= now:
                answers.pop(0)
            elif own_at and own_at[0] <= now:
                own_at.pop(0)
            else:
                self.silent = self.silent or now >= self.beats.seen_at + self.beats.patience
                if self.silent:
                    return
                assert self.beats.beat(now)
                self.sent.append(now)
                if echo:
                    answers.append(now + delay)
                continue
            self.beats.heartbeat_received(now)

    @property
    def per_interval(self):
        """The most heartbeats that were sent within one second."""
        return max(sum(begin <= each < begin + 0.999 for each in self.sent) for begin in self.sent)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.05, 0.3, 0.9])
def test_c35_beside_a_broker_that_echoes(delay):
    wire = Wire(echo=True, delay=delay)
    assert wire.per_interval == 1
    assert (len(wire.sent), wire.silent) == (60, False)


@pytest.mark.parametrize("offset", [0.0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("own", [1.0, 1.3, 2.0, 3.7])
@pytest.mark.parametrize("delay", [0.001, 0.05, 0.3])
def test_c35_beside_a_broker_that_echoes_and_beats_as_well(own, offset, delay):
    wire = Wire(echo=True, own=own, offset=offset, delay=delay)
    assert wire.per_interval == 1
    assert not wire.silent


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("own", [0.1, 0.25, 0.5, 0.8])
def test_beside_a_faster_broker_it_beats_as_often(own, echo):
    # C13: that broker's patience is as short as its interval
    wire = Wire(own=own, echo=echo)
    assert wire.beats.interval == pytest.approx(own)
    assert not wire.silent


@pytest.mark.parametrize("own", [1.5, 2.5, 4.0])
def test_beside_a_slower_broker_it_is_patient(own):
    wire = Wire(own=own, liveness=5)
    assert wire.beats.interval == 1.0
    assert wire.beats.patience == pytest.approx(5 * own)
    assert not wire.silent


def test_what_a_request_and_an_answer_frame_teaches_nothing():
    # C35: the request came while the answer was on its way
    beats = Heartbeats(1.0, 5)
    beats.connected(0.0)
    assert beats.beat(1.0)
    beats.command_received(1.02)
    beats.heartbeat_received(1.05)
    assert beats.interval == 1.0


def test_after_work_the_brokers_own_heartbeats_teach():
    beats = Heartbeats(1.0, 5)
    beats.connected(0.0)
    for now in (0.2, 0.4, 3.0):
        beats.command_received(now)
        beats.sent_at = now
    beats.heartbeat_received(3.3)
    assert beats.interval == pytest.approx(0.3)


def test_another_connection_begins_anew():
    beats = Heartbeats(1.0, 5)
    beats.connected(0.0)
    beats.heartbeat_received(0.2)
    assert beats.interval == 0.2
    beats.connected(10.0)
    beats.heartbeat_received(10.6)
    assert beats.interval == pytest.approx(0.6)


def test_heartbeats_read_together_teach_nothing():
    # C13: they waited while this process was held up; the broker did not send them within a moment
    beats = Heartbeats(1.0, 5)
    beats.connected(0.0)
    for now in (1.0, 2.0, 4.0, 4.0, 4.0):
        beats.heartbeat_received(now)
    assert (beats.interval, beats.patience) == (1.0, 10.0)


def test_silence_makes_patient():
    beats = Heartbeats(1.0, 5)
    patience = []
    for _ in range(6):
        beats.broker_was_silent()
        patience.append(beats.patience)
    assert patience == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    long = Heartbeats(30.0, 5)
    long.broker_was_silent()
    assert long.patience == 150.0
