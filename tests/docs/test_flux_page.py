"""The examples of the page about Flux, with genuine Flux tools where they are installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import TIMEOUT_SECONDS, broker, process

FLUX = shutil.which("flux") or shutil.which("/opt/flux/bin/flux")
PYTHON = "/usr/bin/python3"
GATEWAY = (sys.executable, "-m", "zmdp.gateways.cli", "flux")
PAGE = (Path(__file__).parents[2] / "docs" / "interoperability" / "flux.md").read_text()

pytestmark = pytest.mark.skipif(FLUX is None, reason="flux-core is not installed")


def programs():
    """The Python programs of the page, by name."""
    found = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["call.py", "serve.py", "client.py"]
    return dict(found)


@pytest.fixture
def environment(tmp_path):
    """A gateway as the page starts it: the environment of programs that use it, and its broker."""
    with (
        broker() as (_, at),
        process("mdworker", "zmdp.workers.examples:echo", "--broker", at),
        process(*GATEWAY, "--socket", str(tmp_path / "flux"), "--broker", at) as gateway,
    ):
        uri = gateway.line("local://", "stdout")
        assert uri == f"local://{tmp_path}/flux"
        library = next(Path(FLUX).parents[1].glob("lib*/flux/python3*"), Path("/nowhere"))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        yield {**kept, "FLUX_URI": uri, "PYTHONPATH": str(library)}, at


def output(*command, env):
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_the_session(environment):
    env, _ = environment
    (session,) = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    *_, (command, *printed) = [part.splitlines() for part in re.split(r"^\$ ", session, flags=re.MULTILINE)]
    assert command.startswith("flux ping ")
    lines = output(FLUX, *command.split()[1:], env=env)
    assert [line.partition(" time=")[0] for line in lines] == [line.partition(" time=")[0] for line in printed]


def test_the_programs(environment):
    env, at = environment
    source = programs()
    assert output(PYTHON, "-c", source["call.py"], env=env) == ["{'x': 1}"]
    serving = [PYTHON, "-c", source["serve.py"]]
    with subprocess.Popen(serving, env=env, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout.readline() == "serving\n"
        client = source["client.py"].replace("Client()", f'Client("{at}")')
        assert output(sys.executable, "-c", client, env=os.environ) == ["[b'{\"sum\": 3}']"]
        service.kill()
