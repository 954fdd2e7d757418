"""The commands `titanic schedule …`."""

import pytest
from support.titanics import serving


@pytest.fixture
def titanic(bench, tmp_path, in_this_process):
    """Run `titanic schedule …` at a Titanic, and return its exit code and its output."""
    with serving(bench.endpoint, f"sqlite:///{tmp_path}/titanic.db"):

        def schedule(*arguments):
            done = in_this_process("titanic", "schedule", *arguments, MDP_BROKER=bench.endpoint)
            return done.returncode, done.stdout.decode(), done.stderr.decode()

        yield schedule


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("report", "@reboot"), "say when to submit requests: --cron '30 2 * * *', or --every 5m"),
        (("report", "a b c d e"), "say when to submit requests"),
    ],
)
def test_a_schedule_that_does_not_say_when(titanic, words, told):
    code, _, error = titanic("add", "nightly", *words)
    assert (code, told in error) == (2, True), error


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("add", "a", "report", "--cron", "61 * * * *"), 2, "cron is '61 * * * *': bad minute"),
        (("add", "a", "report", "--every", "0.5"), 2, "every must be a whole number of seconds"),
        (
            ("add", "a", "report", "--every", "5m", "--missed", "never"),
            2,
            "'never' is not one of",
        ),
        (("add", "a b", "report", "--every", "5m"), 2, "the schedule's name must be"),
        (("add", "a", "titanic.close", "--every", "5m"), 2, "cannot be called through Titanic"),
        (("rm", "a"), 2, "there is no schedule a"),
        (("run", "a", "--owner", "shop"), 2, "only admins can change what belongs to others"),
        (("pause",), 2, "Missing argument 'NAME…'"),
        (("pause", b"\xff"), 2, "the schedule's name must be"),
        (("add", b"\xff", "report", "--every", "5m"), 2, "the schedule's name must be"),
    ],
)
def test_errors(titanic, arguments, code, problem):
    found, out, error = titanic(*arguments)
    assert (found, out) == (code, "")
    assert problem in error


def test_a_name_that_is_unknown_does_not_keep_the_others(titanic):
    for name in ("a", "b"):
        assert titanic("add", name, "report", "--every", "5m") == (0, "", "")
    code, _, error = titanic("rm", "a", "x", "y", "b")
    assert (code, [line.partition(" there ")[2] for line in error.splitlines()]) == (
        2,
        ["is no schedule x", "is no schedule y"],
    )
    assert titanic("ls") == (0, "", "no schedules\n")


@pytest.mark.parametrize(
    ("interval", "shown"), [("90s", "every 90s"), ("30d", "every 2592000s"), ("1234567s", "every 1234567s")]
)
def test_an_interval_is_shown_in_seconds(titanic, interval, shown):
    assert titanic("add", "a", "report", "--every", interval) == (0, "", "")
    _, out, _ = titanic("ls")
    assert shown in out
