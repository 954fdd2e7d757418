"""Makes the benchmarks importable: they are programs, not a package."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MODULES = {path.stem for path in BENCH.glob("*.py")} | {"stacks"}


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch):
    """Have the benchmarks' folder on the path, as when they run, and forget their modules after each test."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]
