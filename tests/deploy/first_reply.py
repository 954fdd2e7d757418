"""Get one reply with the zmdp that this Python has installed, as a new user does: broker, worker, call.

    python tests/deploy/first_reply.py [compiled|pure]

Then get one from Titanic, for a service that nobody offers yet, and one as in the README's first minute, from
`zmdp dev`.  It needs nothing but zmdp, so that it also runs where wheels are built; it says how long the first reply
took, and with an argument checks what was installed.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SCRIPTS = sysconfig.get_path("scripts")
VERSIONS = {"compiled": "(compiled;", "pure": "(pure Python"}
"""What `--version` says of each kind of wheel."""


def command(name: str, *arguments: str) -> list[str]:
    """Return the command line of a command that this Python has installed."""
    found = shutil.which(name, path=SCRIPTS)
    assert found, f"{name} is not in {SCRIPTS}"
    return [found, *arguments]


def words_of_the_readme() -> str:
    """Return the README's words.py."""
    module = re.search(r"^```python\n(# words.py\n.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert module is not None
    return module[1]


def main() -> None:
    """Run the request."""
    if sys.argv[1:]:
        version = subprocess.check_output(command("mdp-broker", "--version"), text=True)
        assert VERSIONS[sys.argv[1]] in version, version
    began = time.perf_counter()
    with ExitStack() as stack:

        def start(*words: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
            running = stack.enter_context(subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True, cwd=cwd))
            stack.callback(running.terminate)
            return running

        broker = start("mdp-broker", "--bind", "tcp://127.0.0.1:*")
        assert broker.stdout is not None
        endpoint = broker.stdout.readline().strip()
        start("mdworker", "zmdp.workers.examples:echo", "--broker", endpoint)
        call = command("mdclient", "call", "echo", "hello", "--wait", "--timeout", "60", "--broker", endpoint)
        reply = subprocess.check_output(call, text=True)
        assert reply.strip() == "hello", reply
        print(f"first reply after {time.perf_counter() - began:.1f} s")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        database = folder / "titanic.db"
        start("titanic", "serve", "--db", f"sqlite:///{database}", "--broker", endpoint)
        request = command("titanic", "request", "later", "hello", "--timeout", "60", "--broker", endpoint)
        uuid = subprocess.check_output(request, text=True).strip()
        start("mdworker", "zmdp.workers.examples:echo", "--service", "later", "--broker", endpoint)
        fetch = command("titanic", "reply", uuid, "--wait", "--timeout", "60", "--broker", endpoint)
        reply = subprocess.check_output(fetch, text=True)
        assert reply.strip() == "hello", reply
        (folder / "words.py").write_text(words_of_the_readme())
        dev = start("zmdp", "dev", "words:services", cwd=folder)
        assert dev.stdout is not None
        endpoint = dev.stdout.readline().split()[-1]
        call = command("zmdp", "call", "words.count", '"hello big world"', "--wait", "--timeout", "60")
        reply = subprocess.check_output([*call, "--broker", endpoint], text=True)
        assert reply.strip() == "3", reply


if __name__ == "__main__":
    main()
