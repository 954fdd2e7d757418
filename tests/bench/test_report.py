"""The benchmark suite's report: ratios, spreads and tables, made of given records."""

import argparse
import importlib.util
import json

import pytest


@pytest.fixture
def report():
    import report

    return report


@pytest.fixture
def suite():
    import suite

    return suite


def cost(peer, rounds, **params):
    return {"part": "p", "figure": "cost", "unit": "µs", "peer": peer, "params": params, "rounds": rounds}


BASE = {"part": "p", "figure": "cost", "base": "loop"}


def only(report, records):
    (figure,) = report.figures(records)
    return figure


def test_a_ratio_is_the_median_of_the_ratios_of_each_round(report):
    figure = only(report, [BASE, cost("loop", [1.0, 2.0, 4.0], n=1), cost("zmdp", [2.0, 3.0, 4.0], n=1)])
    ratio = figure.row("zmdp", (("n", 1),)).ratio
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.0, 2.0)


def test_without_a_measured_base_there_is_no_ratio(report):
    assert only(report, [cost("zmdp", [2.0])]).row("zmdp", ()).ratio is None
    assert (
        only(report, [BASE, cost("zmdp", [2.0], n=1), cost("loop", [1.0], n=2)]).row("zmdp", (("n", 1),)).ratio is None
    )


def test_failed_rounds_are_left_out_of_values_and_ratios(report):
    figure = only(report, [BASE, cost("loop", [1.0, None, 4.0]), cost("zmdp", [None, 5.0, 8.0])])
    row = figure.row("zmdp", ())
    assert (row.value.low, row.value.high) == (5.0, 8.0)
    assert (row.ratio.median, row.ratio.low, row.ratio.high) == (2.0, 2.0, 2.0)


def test_a_table_names_what_varies_only_where_it_changes(report):
    records = [
        BASE,
        *(cost(peer, [n * size], n=n, m=1) for n in (1, 1000) for peer, size in (("loop", 1.0), ("zmdp", 1.5))),
    ]
    assert report.table(only(report, records)).splitlines() == [
        "| n |  | µs, median (min–max) | × loop (min–max) |",
        "| ---: | --- | ---: | ---: |",
        "| 1 | loop | 1.00 | 1.00 |",
        "|  | zmdp | 1.50 | 1.50 |",
        "| 1,000 | loop | 1,000 | 1.00 |",
        "|  | zmdp | 1,500 | 1.50 |",
    ]
    assert report.constant(only(report, records)) == "1 m"


def results(*records):
    return {
        "date": "today",
        "machine": {"cpu": "abacus", "cores": 2},
        "versions": {"zmdp": "1"},
        "records": list(records),
    }


def test_results_are_written_as_a_page_and_as_json(report, tmp_path):
    found = results(BASE, cost("zmdp", [None, 2.0], n=1))
    report.write(found, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert (tmp_path / "results.md").read_text() == report.markdown(found)


def part(*records, then=None):
    """Return a part that yields these records and then raises `then`, if given."""

    class Module:
        TITLE = "Some part"

        @staticmethod
        def run(options, tell):
            yield from records
            if then is not None:
                raise then

    return Module


def run_parts(suite, monkeypatch, tmp_path, **parts):
    monkeypatch.setattr(
        suite, "find", lambda name: parts[name] if parts[name] else importlib.import_module("no_such_part")
    )
    found = {"records": [], "machine": {}}
    suite.measure(argparse.Namespace(parts=list(parts)), found, tmp_path)
    return found["records"]


def test_a_part_that_fails_or_is_missing_does_not_end_the_others(suite, monkeypatch, tmp_path, capsys):
    failing = part(cost("zmdp", [1.0]), then=OSError("no room"))
    records = run_parts(suite, monkeypatch, tmp_path, cost=failing, stacks=None, mixed=part(cost("zmdp", [2.0])))
    assert [record["rounds"] for record in records if "rounds" in record] == [[1.0], [2.0]]
    assert [(record["part"], record["why"]) for record in records if "skipped" in record] == [
        ("cost", "OSError: no room"),
        ("stacks", "it does not import: No module named 'no_such_part'"),
    ]
    assert "no room" in capsys.readouterr().err
