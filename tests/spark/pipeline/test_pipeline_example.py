"""The example pipeline writes what the same computation gives without services."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS

EXAMPLE = Path(__file__).parents[3] / "examples" / "pipeline.py"


@pytest.fixture(scope="module")
def example():
    """The example's functions, for use in this process."""
    found = importlib.util.spec_from_file_location("example_pipeline", EXAMPLE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def run(*command):
    """Run a command in its own process group, which is killed if it hangs; return its stdout."""
    quick = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **quick},
    )  # fmt: skip
    try:
        out, error = running.communicate(timeout=2 * SPARK_TIMEOUT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, error
    return out


@pytest.mark.long
@pytest.mark.usefixtures("java")
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("how", [[], ["--durable"]])
def test_the_example(example, tmp_path, how):
    out = tmp_path / "out"
    printed = run(sys.executable, str(EXAMPLE), "--rows", "400", "--out", str(out), *how)
    assert "called text.words for 400 rows" in printed
    assert f"the output: {out}/words and {out}/modules" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    documents = [document for document, _ in zip(example.documents(), range(400), strict=False)]
    corpus = pq.read_table(out / "corpus").to_pylist()
    assert {tuple(row.values()) for row in corpus} == set(documents)

    written = {row["name"]: row for row in pq.read_table(out / "words").to_pylist()}
    found = defaultdict(list)
    for module, name, text in documents:
        words = re.findall("[a-z]+", text.lower())
        found[module].append(words)
        row = written.pop(name)
        assert (row["reply_code"], row["reply_error"]) == (200, None)
        assert (row["words"], row["distinct_words"]) == (len(words), len(set(words)))
    assert written == {}

    totals = {row["module"]: row for row in pq.read_table(out / "modules").to_pylist()}
    assert totals.keys() == found.keys()
    for module, texts in found.items():
        every = [word for words in texts for word in words]
        row = totals[module]
        assert (row["documents"], row["words"]) == (len(texts), len(every))
        assert row["words_each"] == pytest.approx(len(every) / len(texts), abs=0.051)
        assert row["longest"] == max(every, key=lambda word: (len(word), word), default=None)
