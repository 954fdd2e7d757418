"""What ends a command: in processes, because it ends the process."""

import os
import signal
import sys
import threading

import pytest
from support.processes import process

from zmdp.mdp.cli.shutdown import Shutdown

PREAMBLE = """
import os, signal, sys, threading, time
from functools import partial
from zmdp.mdp.cli.shutdown import Shutdown
from zmdp.mdp.program import logs

logs.configure("info", "text")
say = partial(print, flush=True)
stopped = threading.Event()
Shutdown = partial(Shutdown, unfinished=lambda: "a great deal")
"""


def command(text, before="", **options):
    """Run a program; `before` comes before everything else."""
    python = os.path.relpath(sys.executable, os.path.dirname(sys.executable))
    return process(python, "-c", before + PREAMBLE + text, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_the_first_step(number):
    with command("with Shutdown(stopped.set, limit=3600.0):\n  say('ready')\n  stopped.wait()\n") as running:
        running.line("ready", "stdout")
        assert running.end(number) == 0
        running.line("stopping once the requests in progress are finished, within 3600 s; interrupt again to exit imm")


def test_each_further_signal_takes_the_next_step_and_the_one_after_the_last_exits():
    text = (
        "with Shutdown(partial(say, 'first'), partial(say, 'second'), limit=3600.0):\n  say('ready')\n  stopped.wait()"
    )
    with command(text) as running:
        running.line("ready", "stdout")
        running.send_signal(signal.SIGTERM)
        running.line("first", "stdout")
        running.send_signal(signal.SIGINT)
        running.line("second", "stdout")
        assert running.end() == 1


def test_further_signals_can_be_ignored():
    text = "with Shutdown(partial(say, 'first'), limit=0.2, exits=False):\n  say('ready')\n  stopped.wait()"
    with command(text) as running:
        running.line("ready", "stdout")
        running.send_signal(signal.SIGTERM)
        running.line("first", "stdout")
        assert running.end() == 1
        running.line("not finished within 0.2 s: gave up a great deal")


@pytest.mark.parametrize(
    "step",
    [
        "stopped.wait",
        "sys.exit",
        "partial(os.write, full, bytes(1 << 20))",
        "lambda: [None for _ in iter(int, 1)]",
    ],
    ids=["waits", "exits", "blocks", "spins"],
)
def test_the_limit_holds_whatever_a_step_does(step):
    text = f"_, full = os.pipe()\nwith Shutdown({step}, limit=0.1, grace=0.1):\n  say('ready')\n  stopped.wait()"
    with command(text) as running:
        running.line("ready", "stdout")
        assert running.end() == 1
        running.line("not finished within 0.1 s: gave up a great deal")


def test_the_limit_holds_although_nobody_reads_the_log_and_it_cannot_be_told_what_was_given_up():
    text = (
        "_, full = os.pipe()\nos.dup2(full, 2)\nos.set_blocking(full, False)\n"
        "try:\n  while True: os.write(full, bytes(4096))\nexcept BlockingIOError: os.set_blocking(full, True)\n"
        "with Shutdown(lambda: None, limit=0.1, grace=0.1):\n  say('ready')\n  stopped.wait()"
    )
    with command(text) as running:
        running.line("ready", "stdout")
        assert running.end() == 1


def test_the_limit_holds_while_the_interpreter_is_not_let_go():
    text = (
        "import itertools\ndef hold():\n  say('held')\n  sum(itertools.repeat(0))\n"
        "with Shutdown(hold, limit=0.1, grace=0.1):\n  say('ready')\n  stopped.wait()"
    )
    with command(text) as running:
        running.line("ready", "stdout")
        assert running.end() == 1
        running.line("in hold")  # where the threads are


def test_the_limit_holds_while_python_waits_for_threads_after_the_block():
    text = (
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(threading.Event().wait)\n"
        "with Shutdown(stopped.set, limit=0.1, grace=0.1):\n  say('ready')\n  stopped.wait()"
    )
    with command(text) as running:
        running.line("ready", "stdout")
        assert running.end() == 1
        running.line("not finished within 0.1 s: gave up a great deal")


def test_a_command_can_begin_to_stop_without_a_signal():
    text = (
        "with Shutdown(limit=0.1, at_limit=partial(say, 'given up')) as shutdown:\n  shutdown.begin()\n  stopped.wait()"
    )
    with command(text) as running:
        running.line("given up", "stdout")
        assert running.wait() == 1
        running.line("not finished within 0.1 s: gave up a great deal")


def test_signals_of_a_forked_child_are_its_own():
    text = (
        "with Shutdown(partial(say, 'stopped'), limit=3600.0):\n"
        "  child = os.fork()\n"
        "  if not child:\n    say('child is', os.getpid())\n    time.sleep(60)\n    os._exit(1)\n"
        "  say('child ended with', -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "  stopped.wait()"
    )
    with command(text) as running:
        os.kill(int(running.line("child is", "stdout").split()[-1]), signal.SIGTERM)
        running.line("child ended with 15", "stdout")
        assert "stopping" not in running.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_a_child_that_has_just_been_forked_is_its_own(number):
    """It comes before the child handles signals itself."""
    before = f"import os\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), {number:d}))\n"
    text = (
        "with Shutdown(partial(say, 'stopped'), limit=3600.0):\n"
        "  child = os.fork()\n"
        "  if not child:\n    time.sleep(60)\n    os._exit(1)\n"
        "  say('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "  say('blocked', signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "  stopped.wait()"
    )
    with command(text, before) as running:
        code = 1 if number == signal.SIGINT else -number  # Python raises KeyboardInterrupt in the child
        running.line(f"child ended with {code}", "stdout")
        running.line("blocked set()", "stdout")
        assert "stopping" not in running.stderr
        assert "SIGHUP" not in running.stderr


def test_a_forked_child_has_the_signals_of_a_program_that_handles_none():
    text = (
        "with Shutdown(limit=1.0), Shutdown(limit=1.0):\n"
        "  if not os.fork():\n"
        "    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL\n"
        "    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n"
        "    say('child', signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "    os._exit(0)\n"
        "  os.wait()\n"
    )
    with command(text) as running:
        running.line("child -1 set()", "stdout")
        assert running.wait() == 0


def test_a_hangup_reloads():
    text = "with Shutdown(limit=1.0, reload=partial(say, 'again')):\n  say('ready')\n  stopped.wait()"
    with command(text) as running:
        running.line("ready", "stdout")
        for count in (1, 2):
            running.send_signal(signal.SIGHUP)
            running.line("again", "stdout", count=count)
        running.kill()


def test_a_hangup_of_a_command_with_nothing_to_reload_is_logged():
    with command("with Shutdown(stopped.set, limit=3600.0):\n  say('ready')\n  stopped.wait()") as running:
        running.line("ready", "stdout")
        running.send_signal(signal.SIGHUP)
        running.line("SIGHUP: there is nothing to reload: restart it to change its settings")
        assert running.end() == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_hangups_that_the_program_has_installed_stays(when):
    install, serve = (
        "signal.signal(signal.SIGHUP, lambda *_: os.write(1, b'mine\\n'))",  # it may interrupt `say`
        "with Shutdown(stopped.set, limit=3600.0):\n  say('ready')\n  stopped.wait()",
    )
    text = f"{install}\n{serve}" if when == "before" else serve.replace("say('ready')", f"{install};say('ready')")
    with command(text) as running:
        running.line("ready", "stdout")
        running.send_signal(signal.SIGHUP)
        running.line("mine", "stdout")
        assert running.end() == 0
        assert "SIGHUP" not in running.stderr


def test_a_hangup_because_the_terminal_was_closed_ends_the_command():
    """Also one whose output goes elsewhere."""
    terminal, theirs = os.openpty()
    opened = f"os.open({os.ttyname(theirs)!r}, os.O_RDWR)"
    before = f"import fcntl, os, termios\nfcntl.ioctl({opened}, termios.TIOCSCTTY, 0)\n"
    text = "with Shutdown(stopped.set, limit=3600.0):\n  say('ready')\n  stopped.wait()"
    with command(text, before, new_group=True) as running:
        running.line("ready", "stdout")
        os.close(theirs)
        os.close(terminal)
        assert running.wait() == 0
        running.line("stopping once the requests in progress are finished")


def test_nothing_is_left_without_a_signal():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Shutdown(limit=0.0, unfinished=str):
        assert any(thread.name == "shutdown" for thread in threading.enumerate())
    assert not any(thread.name == "shutdown" for thread in threading.enumerate())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
