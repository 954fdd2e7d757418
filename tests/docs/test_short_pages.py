"""The programs of the short pages that answer old requests of other systems' users, each with a real broker."""

import shlex
import sys
from contextlib import ExitStack

import pytest
from support.pages import DOCS, blocks
from support.processes import broker, process, run
from support.titanics import QUICK


@pytest.mark.parametrize(
    ("page", "worker_prints"),
    [
        ("await-result", ""),
        ("cancel", "training was cancelled"),
        ("concurrent-requests", ""),
        ("async-tasks", ""),
        ("several-callers", ""),
    ],
)
def test_the_programs_print_what_the_page_shows(page, worker_prints, tmp_path):
    text = (DOCS / "how-to" / f"{page}.md").read_text()
    for program in blocks(text, "python"):
        (tmp_path / program.splitlines()[0].removeprefix("# ")).write_text(program)
    (session,) = blocks(text, "console")
    start, work, *titanic, call = session.removeprefix("$ ").split("\n$ ")
    call, printed = call.split("\n", 1)
    assert (start, call) == ("mdp-broker", "python main.py")
    with broker() as (_, at), ExitStack() as stack:
        env = {"MDP_BROKER": at, "TITANIC_DB": str(tmp_path / "titanic.db")}
        worker = stack.enter_context(process(*shlex.split(work), cwd=tmp_path, **env))
        worker.line("serving at")
        for command in titanic:
            stack.enter_context(process(*shlex.split(command), *QUICK, cwd=tmp_path, **env)).line("serving")
        done = run(sys.executable, str(tmp_path / "main.py"), **env)
        assert done.stdout.decode().strip() == printed.strip(), done.stderr.decode()
        if worker_prints:
            assert f"`{worker_prints}`" in text
            worker.line(worker_prints, "stdout")
