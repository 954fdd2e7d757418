"""Which modules run compiled, and that `ZMDP_PURE=1` disables them."""

import json
import os
import subprocess
import sys

import pytest
from support.processes import TIMEOUT_SECONDS, broker

from zmdp import version
from zmdp.clients import Client

QUICK = ("--heartbeat", "0.2", "--liveness", "50")
PURE = {"multipart": False, "batch": False, "machines": False}
TOLD = "import json; from zmdp import version; print(json.dumps([version.compiled_parts(), version.build()]))"


def told(**env):
    run = subprocess.run(
        [sys.executable, "-c", TOLD],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    return json.loads(run.stdout)


def test_zmdp_pure_disables_all_compiled_modules():
    assert told(ZMDP_PURE="1") == [PURE, "pure Python, as ZMDP_PURE asks"]


def test_compiled_modules_are_used():
    parts, words = told(ZMDP_PURE="")
    if all(parts.values()):
        assert words == "compiled"
    elif not any(parts.values()):
        assert words == "pure Python"
    else:
        assert [name for name, there in parts.items() if f"{name} compiled" in words] == [
            name for name, there in parts.items() if there
        ]


@pytest.mark.parametrize("pure", ["", "1"], ids=["as built", "asked for"])
def test_a_broker_says_once_that_it_is_not_compiled_unless_that_was_asked_for(pure, monkeypatch):
    monkeypatch.setenv("ZMDP_PURE", pure)
    with broker(*QUICK) as (process, _):
        process.line("ready on")
        assert process.end() == 0
        unexpected = not pure and not all(told(ZMDP_PURE="")[0].values())
        assert process.stderr.count("INFO zmdp.broker") > 1
        assert process.stderr.count("slower than it could be: not all of zmdp is compiled") == int(unexpected)


@pytest.mark.parametrize("pure", ["", "1"], ids=["as built", "pure"])
def test_large_bodies_arrive_unchanged(pure, monkeypatch):
    monkeypatch.setenv("ZMDP_PURE", pure)
    sizes = (0, 1, 8191, 8192, 65535, 65536, 65537, 3_000_000)
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        worker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from zmdp.workers import Worker; Worker('echo', lambda r: r, broker=sys.argv[1]).run()",
                endpoint,
            ]
        )
        try:
            parts = json.loads(client.request("mmi.broker", b"")[0])["compiled"]
            assert parts == (PURE if pure else {**version.compiled_parts(), **told(ZMDP_PURE="")[0]})
            for size in sizes:
                body = [b"head", os.urandom(size), b"", b"tail"]
                assert client.request("echo", *body) == body
        finally:
            worker.terminate()
            worker.wait()
