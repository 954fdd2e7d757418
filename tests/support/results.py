"""Plugins of pytest for the whole of the tests: results for `suites.py`, markers, builds, missing packages."""

import json
import os
import re
from pathlib import Path
from textwrap import shorten

import pytest

from zmdp import version

COMPILED = version.compiled_parts()["machines"]
"""Whether the machines are compiled; the other build runs with ZMDP_PURE=1."""

TESTS = Path(__file__).parents[1]
UNIT_FOLDERS = (
    "mdp", "mdp/broker", "mdp/broker/core", "mdp/broker/core/scheduling", "mdp/broker/federation", "mdp/broker/io",
    "mdp/broker/operators", "mdp/transport", "mdp/wire", "mmi",
)  # fmt: skip
"""Folders whose tests run in pure Python, with coverage; other files have `pytestmark = pytest.mark.unit`."""
COUNTED = ("test_cost.py", "test_work.py")
"""Files that count instructions and memory, which coverage would add to."""
BUILT_TWICE = ("mdp/transport", "mdp/wire", "simulation")
"""Folders that both builds run: the code exists twice, or its compiled form does more than mypyc's translation."""
END_TO_END = "tests/spark/test_end_to_end.py"
"""It starts its own Java processes, beside the session that the other tests of Spark share."""
LONGEST_FIRST = ("spark", "titanic", "processes", "clients")

MAX_REASON = 120
"""Characters of a reason for skipping a test that are shown."""
NOT_INSTALLED = "the package {} is not installed"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_OURS = ("zmdp", "support", "doors", "simulation", "attacks", "crash")


def package(name):
    """Return the package, or skip the test if it could not be installed."""
    return pytest.importorskip(name, reason=NOT_INSTALLED.format(name))


def _mark(item):
    """Mark a unit, and a test that both builds run."""
    folder = item.path.parent.relative_to(TESTS).as_posix()
    if folder in UNIT_FOLDERS and item.path.name not in COUNTED:
        item.add_marker("unit")
    if folder in BUILT_TWICE:
        item.add_marker("built_twice")


def _turn(item):
    room = item.path.relative_to(TESTS).parts[0]
    return LONGEST_FIRST.index(room) if room in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests by their folders, and begin with those that take longest.

    Deselect the tests that the other build runs: they are not skipped, which would need a reason to look at.
    """
    ours = [item for item in items if item.path.is_relative_to(TESTS)]
    for item in ours:
        _mark(item)
    if "PYTEST_XDIST_WORKER" in os.environ and len(ours) == len(items):
        items.sort(key=_turn)
    other = "pure_only" if COMPILED else "compiled_only"
    theirs = [item for item in items if item.get_closest_marker(other)]
    if theirs:
        config.hook.pytest_deselected(items=theirs)
        items[:] = [item for item in items if not item.get_closest_marker(other)]


def pytest_xdist_make_scheduler(config, log):
    """Return what distributes tests with `--dist loadfile`."""
    # xdist_group and --dist loadgroup do nothing with pytest 9.2 (pytest-dev/pytest-xdist, issue 1386).
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Gives one process the tests of a file, and those of all files that share Spark's session."""

        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            if path.startswith("tests/simulation/"):
                return nodeid
            return "spark" if path.startswith("tests/spark/") and path != END_TO_END else path

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """Escape in the output of a test what is not UTF-8: xdist cannot send it, and would end the run."""
    report = (yield).get_result()
    report.sections = [(name, _escaped(text)) for name, text in report.sections]
    if report.failed and _escaped(report.longreprtext) != report.longreprtext:
        report.longrepr = _escaped(report.longreprtext)


def _escaped(text):
    return text.encode(errors="backslashreplace").decode()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """Skip the modules that need a package that could not be installed."""
    report = (yield).get_result()
    if report.failed:
        missing = _MISSING.search(str(report.longrepr))
        if missing and missing[1] not in _OURS:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {NOT_INSTALLED.format(missing[1])}")


def pytest_collectreport(report):
    """Record a module that cannot be imported, or needs what is missing."""
    if report.failed:
        _record(report.nodeid, "failed", text=report.longreprtext)
    elif report.skipped:
        _record(report.nodeid, "skipped", reason=_reason(report))


def pytest_internalerror(excrepr):
    """Record an end of the whole run, after which the exit code of pytest may be 0 with xdist."""
    _record("pytest", "failed", text=str(excrepr))


def pytest_runtest_logreport(report):
    """Record a test when it has ended."""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            _record(report.nodeid, "xfailed")
        else:
            _record(report.nodeid, "skipped", reason=_reason(report))
    elif report.failed:
        _record(report.nodeid, "failed", text=report.longreprtext + "".join(f"\n{n}\n{t}" for n, t in report.sections))
    elif report.when == "call":
        _record(report.nodeid, "passed")


def _reason(report):
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return shorten(text.removeprefix("Skipped: "), MAX_REASON)  # in one line


def _record(test, outcome, **more):
    path = os.environ.get("ZMDP_TEST_RESULTS")
    if path and not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(path, "a") as file:
            file.write(json.dumps({"id": test, "outcome": outcome, **more}) + "\n")
