"""What all commands share: one-line errors that name the setting as the user did."""

import click
import pytest

from zmdp.mdp.cli.console import Number, run, with_default


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
    ("arguments", "variable", "origin", "value"),
    [
        (["--size", "x"], None, "'--size'", "x"),
        (["--size", "x"], "5", "'--size'", "x"),
        (["-s", "x"], "5", "'--size' / '-s'", "x"),
        ([], "y", "PROG_SIZE (environment variable)", "y"),
    ],
)
def test_an_invalid_value_is_reported_with_its_origin(outcome, monkeypatch, arguments, variable, origin, value):
    names = ("--size", "-s") if "/" in origin else ("--size",)

    @click.command()
    @click.option(*names, type=Number("bytes"), envvar="PROG_SIZE", show_envvar=True)
    def cli(size):
        del size

    if variable is not None:
        monkeypatch.setenv("PROG_SIZE", variable)
    problem = f"Invalid value for {origin}: expected a number of bytes (greater than 0), got '{value}'"
    assert outcome(cli, *arguments) == (2, f"prog: {problem}. See 'prog --help'\n")


def test_a_missing_option_names_its_environment_variable_too(outcome):
    @click.command()
    @click.option("--size", required=True, envvar="PROG_SIZE", show_envvar=True)
    def cli(size):
        del size

    code, told = outcome(cli)
    assert (code, "'--size' (env var: 'PROG_SIZE')" in told) == (2, True)


@pytest.mark.parametrize(
    ("default", "unit", "shown"),
    [
        (1, "times", "1 time"),
        (1.0, "seconds", "1 second"),
        (2.5, "seconds", "2.5 seconds"),
        ("never", "", "never"),
    ],
)
def test_defaults_have_their_unit(default, unit, shown):
    assert with_default("Text.", default, unit) == f"Text.  [default: {shown}]"
