"""The benchmarks' full stacks: what they compute, and what they report as missing, without a server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_percentiles():
    from stacks.load import percentile

    values = [float(each) for each in range(1, 101)]
    assert [percentile(values, each) for each in (0, 1, 50, 99, 99.5, 100)] == [1.0, 1.0, 50.0, 99.0, 100.0, 100.0]
    assert [percentile([7.0], each) for each in (0, 50, 100)] == [7.0] * 3
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([], 50) == 0.0


def test_the_schedule_is_reproducible_and_has_the_requested_rate():
    from stacks.load import schedule

    moments = schedule(200.0, 50.0, 0.05)
    assert moments == schedule(200.0, 50.0, 0.05)
    assert moments != schedule(200.0, 50.0, 0.05, seed=2)
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    assert sum(slow for _, slow in moments) == pytest.approx(500, rel=0.25)
    assert moments == sorted(moments)
    assert 0 < moments[0][0] < moments[-1][0] < 50


def every_peer():
    import durable
    import mixed
    import stacks

    parts = (stacks.contenders(), mixed.contenders(), mixed.contenders(mixed.AWAITING), durable.contenders())
    return {peer.name: peer for part in parts for peer in part}


def test_a_child_process_makes_the_same_peer(monkeypatch):
    import importlib

    for peer in every_peer().values():
        module, _, name = peer.target.partition(":")
        settings = json.loads(json.dumps(peer.settings))
        assert getattr(importlib.import_module(module), name)(**settings) == peer


def test_peers_take_turns_and_a_failed_peer_is_skipped():
    from processes import FailedError
    from stacks import running
    from stacks.peer import Peer

    class Missing(Peer):
        def missing(self):
            return "not here"

    order = []

    def measure(peer, number):
        order.append((number, peer.name))
        if peer.name == "bad" and number == 1:
            raise FailedError("it broke")
        yield running.record("part", ("rate", "1/s"), peer.name, {"outstanding": 1}, float(number))

    peers = [Missing("gone"), Peer("good"), Peer("bad")]
    records = list(running.in_turn("part", peers, 3, lambda text: None, measure))
    assert order == [(0, "good"), (0, "bad"), (1, "good"), (1, "bad"), (2, "good")]
    assert [each for each in records if "skipped" in each] == [
        {"part": "part", "skipped": "gone", "why": "not here"},
        {"part": "part", "skipped": "bad", "why": "it failed in round 2: it broke"},
    ]
    assert [each["rounds"] for each in records if each.get("peer") == "good"] == [[0.0], [1.0], [2.0]]


# ── the targets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def figure_of(peers, params):
    """Return a figure with the rounds of these peers."""
    import report

    return report.Figure("p", "rate", rows=[report.Row(name, tuple(params.items()), r) for name, r in peers.items()])


def test_a_target_is_the_median_of_the_ratios_of_each_round():
    from targets import Target

    target = Target("t", "≥", 3, "p", "rate", "zmdp", "NATS", {"outstanding": 64})
    figure = figure_of({"zmdp": [30.0, 80.0, None], "NATS": [10.0, 20.0, 1.0]}, {"outstanding": 64})
    found = target.measured([figure])
    assert (found.median, found.low, found.high) == (3.5, 3.0, 4.0)
    assert target.reached(found)
    assert not Target("t", ">", 3.5, "p", "rate", "zmdp", "NATS").reached(found)
    assert Target("t", "≤", 3.5, "p", "rate", "zmdp", "NATS").reached(found)
    assert not Target("t", "≤", 3.5, "p", "rate", "zmdp", every=True).reached(found)


def test_a_target_that_was_not_measured_is_not_reached():
    from targets import Target, judge

    target = Target("t", "≥", 3, "p", "rate", "zmdp", "NATS", {"outstanding": 64})
    assert target.measured([]) is None
    assert target.measured([figure_of({"zmdp": [1.0]}, {"outstanding": 64})]) is None
    assert target.measured([figure_of({"zmdp": [1.0], "NATS": [1.0]}, {"outstanding": 1})]) is None
    assert not any("reached" in row for row in judge([]))


def test_each_target_names_a_figure_and_peers_of_its_part():
    """The part of each target measures its figure, with its peers."""
    import cost
    import death
    import durable
    import mixed
    import stacks
    from targets import targets

    names = {
        stacks.PART: [each.name for each in stacks.contenders()],
        mixed.PART: [each.name for each in mixed.contenders()],
        durable.PART: [each.name for each in durable.contenders()],
    }
    figures = {
        stacks.PART: [name for name, _ in stacks.FIGURES],
        mixed.PART: [mixed.figure(percent) for percent in mixed.PERCENTILES],
        durable.PART: [name for name, _ in durable.FIGURES],
        death.PART: [death.FIGURE],
    }
    loads = {(cost.CPU + point.by, *sorted(point.params.items())) for point in cost.points(quick=True)}
    for target in targets():
        if target.part == cost.PART:
            assert (target.figure, *sorted(target.params.items())) in loads
            assert (target.peer, target.over) == (cost.ZMDP, cost.C)
        if target.part in names:
            assert {target.peer, target.over} <= set(names[target.part])
        if target.part in figures:
            assert target.figure in figures[target.part]


def test_a_part_of_the_suite_runs(tmp_path):
    """The disk needs no server, so it is measured wherever the tests run."""
    options = ("--parts", "durable", "--only", "write", "--rounds", "1", "--seconds", "0.01", "--out", tmp_path)
    subprocess.run([sys.executable, BENCH / "suite.py", *options], check=True, capture_output=True)
    assert "write and fdatasync" in (tmp_path / "results.md").read_text()
