"""What all commands share: one-line errors that name the setting as the user did."""

import sys

import click
import pytest

from zmdp.mdp.cli.console import (
    EndpointList,
    Group,
    LazyGroup,
    all_values,
    log_level_option,
    log_to_stderr,
    options,
    run,
)
from zmdp.mdp.errors import (
    BrokerUnreachable,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from zmdp.mdp.program import logs


@pytest.fixture
def outcome(capsys, monkeypatch):
    """Run a command with these arguments; return its exit code and what it wrote to stderr."""

    def run_it(command, *arguments):
        monkeypatch.setattr("sys.argv", ["prog", *arguments])
        with pytest.raises(SystemExit) as ended:
            run("prog", command)
        return ended.value.code, capsys.readouterr().err

    return run_it


def test_an_error_of_the_system_names_the_file_and_the_cause(outcome, tmp_path):
    @click.command()
    def cli():
        tmp_path.read_text()

    assert outcome(cli) == (1, f"prog: {tmp_path}: Is a directory\n")


def test_an_error_of_the_system_without_a_file_is_about_the_output(outcome):
    @click.command()
    def cli():
        raise OSError(28, "No space left on device")

    assert outcome(cli) == (1, "prog: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ZmdpError("other"), 1, "other"),
        (RequestTimeout("late", code=408, text="late"), 3, "late"),
        (StreamInterrupted("silent"), 3, "silent"),
        (ServiceNotFound("nobody"), 4, "nobody"),
        (BrokerUnreachable("nothing"), 5, "nothing"),
        (ServiceError(422, "no such colour"), 6, "failed with 422: no such colour"),
        (ServiceError(422, "no", b'{"given":1}'), 6, 'failed with 422: no; detail: {"given":1}'),
        (ServiceError(422, "no", b"\xff\0"), 6, "failed with 422: no; detail: 2 bytes that are not text"),
        (ServiceError(422, "no", b"x" * 2000), 6, f"failed with 422: no; detail: {'x' * 1000}…"),
        (WorkerLost("lost", code=502, text="lost"), 6, "lost"),
        (StreamInterrupted("lost", code=502, text="lost"), 6, "lost"),
        (RetryLater("full"), 7, "full"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_error_has_its_exit_code(outcome, error, code, told):
    @click.command()
    def cli():
        raise error

    assert outcome(cli) == (code, f"prog: {told}\n")


@pytest.mark.parametrize("given", ["tcp://h:1 ipc:///s", "tcp://h:1,ipc:///s", "tcp://h:1, ipc:///s,"])
def test_endpoints_in_the_environment_are_separated_by_commas_or_spaces(outcome, monkeypatch, given):
    found = []

    @click.command()
    @click.option("--bind", type=EndpointList(), multiple=True, callback=all_values, envvar="PROG_BIND")
    def cli(bind):
        found.extend(bind)

    monkeypatch.setenv("PROG_BIND", given)
    assert outcome(cli) == (0, "")
    assert found == ["tcp://h:1", "ipc:///s"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("tcp://h", "'tcp://h' is not a valid endpoint: it has no port, such as :5555 at its end"),
        ("tcp://::1:5555", "an IPv6 address is written in brackets, as in tcp://[::1]:5555"),
        ("tcp://[::1:5555", "an IPv6 address is written in brackets, as in tcp://[::1]:5555"),
        ("tcp://[::1]", "'tcp://[::1]' is not a valid endpoint: it has no port, such as :5555 at its end"),
        ("tcp://h:", "'tcp://h:' is not a valid endpoint: its port is '', but a port is a number up to 65535"),
        ("tcp://h:x", "'tcp://h:x' is not a valid endpoint: its port is 'x', but a port is a number up to 65535"),
        ("tcp://h:65536", "its port is '65536', but a port is a number up to 65535"),
        ("h:1", "expected an endpoint such as tcp://h:1, got 'h:1'"),
        ("tcp://:1", "expected an endpoint such as tcp://127.0.0.1:5555 or ipc:///tmp/broker, got 'tcp://:1'"),
        ("", "expected an endpoint such as tcp://127.0.0.1:5555 or ipc:///tmp/broker, got ''"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_told(outcome, given, problem):
    @click.command()
    @click.option("--bind", type=EndpointList(), multiple=True)
    def cli(bind):
        raise AssertionError(bind)

    code, told = outcome(cli, "--bind", given)
    assert code == 2
    assert problem in told


@pytest.mark.parametrize(
    "given", ["tcp://h:65535", "tcp://*:*", "tcp://[::1]:1", "tcp://[::1]:*", "ipc:///s", "inproc://x"]
)
def test_valid_endpoints(outcome, given):
    @click.command()
    @click.option("--bind", type=EndpointList(), multiple=True, callback=all_values)
    def cli(bind):
        assert bind == (given,)

    assert outcome(cli, "--bind", given) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "variable", "used"),
    [
        ([], None, ("info", "text")),
        (["--log-format", "json"], None, ("info", "json")),
        (["--log-format", "JSON", "--log-level", "ERROR"], "text", ("error", "json")),
        ([], "json", ("info", "json")),
    ],
)
def test_the_options_for_logs(outcome, monkeypatch, arguments, variable, used):
    monkeypatch.setattr(logs, "configure", lambda *given: configured.append(given))
    configured = []
    if variable is not None:
        monkeypatch.setenv("MDP_LOG_FORMAT", variable)

    @click.command()
    @log_level_option
    def cli(log_level):
        log_to_stderr(log_level)

    assert outcome(cli, *arguments) == (0, "")
    assert configured == [used]


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """A group with a command of its own and one in another module."""
    (tmp_path / "later_commands.py").write_text("import click\n\n@click.command()\ndef sleep():\n    print('slept')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "later_commands", raising=False)

    @click.group(cls=LazyGroup, commands_in={"later": "later_commands:sleep"})
    def cli():
        """Wait."""

    @cli.command()
    def now():
        click.echo("done")

    return cli


def test_a_lazy_group_imports_only_the_command_that_is_used(lazy, monkeypatch, capsys):
    for command, told in (("now", "done\n"), ("later", "slept\n")):
        assert "later_commands" not in sys.modules
        monkeypatch.setattr("sys.argv", ["prog", command])
        with pytest.raises(SystemExit) as ended:
            run("prog", lazy)
        assert (ended.value.code, capsys.readouterr().out) == (0, told)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_a_group_prints_its_help(lazy, monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["prog", *arguments])
    with pytest.raises(SystemExit) as ended:
        run("prog", lazy)
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (0, "")
    assert "Usage: prog [OPTIONS] COMMAND [ARGS]...\n\n  Wait." in told.out
    assert told.out.index("  now") < told.out.index("  later")


def test_errors_in_the_usage_are_told_by_click(lazy, outcome):
    told = "Usage: prog [OPTIONS] COMMAND [ARGS]...\nTry 'prog --help' for help.\n\nError: No such command 'never'.\n"
    assert outcome(lazy, "never") == (2, told)


@pytest.mark.parametrize(
    ("words", "size", "values"),
    [
        (["-5"], None, ("-5",)),
        (["a", "-1.5e3", "--size", "7", "b"], "7", ("a", "-1.5e3", "b")),
        (["--size", "-7", "-.5"], "-7", ("-.5",)),
        (["--size=-7", "-0", "-"], "-7", ("-0", "-")),
        (["-1", "--", "--size", "-2"], None, ("-1", "--size", "-2")),
        (["-1", "--loud"], None, ("-1",)),
        (["--", "-x"], None, ("-x",)),
    ],
    ids=str,
)
def test_numbers_are_values_although_they_begin_like_options(words, size, values):
    found = []

    @click.group(cls=Group)
    def cli():
        pass

    @cli.command()
    @click.argument("given", nargs=-1)
    @click.option("--size")
    @click.option("--loud", is_flag=True)
    def take(given, size, loud):
        found.append((given, size, loud))

    cli.main(["take", *words], standalone_mode=False)
    assert found == [(values, size, "--loud" in words)]


def test_several_options_are_added_in_their_order(outcome):
    both = options(click.option("--one", default=1), click.option("--two", default=2))

    @click.command()
    @both
    def cli(one, two):
        assert (one, two) == (3, 2)

    assert [each.name for each in cli.params] == ["one", "two"]
    assert outcome(cli, "--one", "3") == (0, "")
