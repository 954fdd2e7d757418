"""Plugins of pytest for the whole of the tests: results for `stages.py`, builds, and packages that are missing."""

import json
import os
import re
from textwrap import shorten

import pytest

from zmdp.mdp import compiled

COMPILED = compiled.parts()["machines"]
"""Whether the machines are compiled; the other build runs with ZMDP_PURE=1."""

MAX_REASON = 120
"""Characters of a reason for skipping a test that are shown."""
NOT_INSTALLED = "the package {} is not installed"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_OURS = ("zmdp", "support", "simulation", "attacks", "crash")


def package(name):
    """Return the package, or skip the test if it could not be installed."""
    return pytest.importorskip(name, reason=NOT_INSTALLED.format(name))


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that the other build runs: they are not skipped, which would need a reason to look at."""
    other = "pure_only" if COMPILED else "compiled_only"
    theirs = [item for item in items if item.get_closest_marker(other)]
    if theirs:
        config.hook.pytest_deselected(items=theirs)
        items[:] = [item for item in items if not item.get_closest_marker(other)]


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
