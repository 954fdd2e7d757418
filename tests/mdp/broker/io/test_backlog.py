"""Until when all peers have been heard, while messages keep arriving."""

from zmdp.mdp.broker.io.backlog import Backlog


def test_when_nothing_is_left_everybody_has_been_heard():
    backlog = Backlog(1.0)
    assert backlog.heard == 1.0
    backlog.turn(2.0, turns=0)
    assert backlog.heard == 2.0


def test_while_something_is_left_a_round_takes_as_many_turns_as_there_are_peers_to_hear():
    backlog = Backlog(1.0)
    heard = []
    for now in range(2, 10):
        backlog.turn(now, turns=3)
        heard.append(backlog.heard)
    assert heard == [1.0, 1.0, 1.0, 2, 2, 2, 2, 6]


def test_a_round_ends_early_when_nothing_is_left():
    backlog = Backlog(1.0)
    backlog.turn(2.0, turns=3)
    backlog.turn(3.0, turns=0)
    assert backlog.heard == 3.0
    for now in (4.0, 5.0, 6.0):
        backlog.turn(now, turns=3)
        assert backlog.heard == 3.0
