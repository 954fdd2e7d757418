"""A program that PyInstaller has made offers a service, and calls it."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from support.processes import TIMEOUT_SECONDS, broker, eventually, process, run
from support.results import package

from zmdp.clients import Client

PROGRAM = """
import asyncio
import sys
from dataclasses import dataclass

from zmdp import AsyncClient, Client, Services

services = Services()


@dataclass
class Job:
    text: str
    times: int


@services.service("repeat")
def repeat(job: Job) -> str:
    return job.text * job.times


async def call():
    async with AsyncClient() as client:
        return await client.call(repeat, Job("cd", 2))


if sys.argv[1:] == ["work"]:
    services.run()
else:
    with Client(timeout=60, retries=1) as client:
        print(client.call(repeat, Job("ab", 2)), asyncio.run(call()))
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_client_and_a_worker_in_one_folder(tmp_path):
    package("PyInstaller")
    if shutil.which("objdump") is None:
        pytest.skip("PyInstaller needs objdump (Debian: apt-get install binutils)")
    (tmp_path / "program.py").write_text(PROGRAM)
    made = subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level=WARN", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    program = str(tmp_path / "dist" / "program" / "program")
    with broker() as (_, at), process(program, "work", MDP_BROKER=at) as worker:
        with Client(at, timeout=TIMEOUT_SECONDS) as client:
            eventually(lambda: json.loads(client.request("mmi.stats")[0])["workers"])
        called = run(program, MDP_BROKER=at)
        assert called.stdout.decode().split() == ["abab", "cdcd"], called.stderr
        assert worker.end(signal.SIGINT) == 0
