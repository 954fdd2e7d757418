"""The commands `titanic schedule …`, and the file of `titanic serve --schedules`."""

import time

import pytest
from support.processes import free_endpoint, run
from support.titanics import serving

from zmdp.mdp.errors import SettingError
from zmdp.titanic.cli.schedule_file import load
from zmdp.titanic.frames import unpack

NOW = 1_800_000_000.0


@pytest.fixture
def titanic(bench, tmp_path):
    """Run `titanic schedule …` at a Titanic, and return its exit code and its output."""
    with serving(bench.endpoint, f"sqlite:///{tmp_path}/titanic.db"):

        def schedule(*arguments, stdin=b""):
            done = run("titanic", "schedule", *arguments, stdin=stdin, MDP_BROKER=bench.endpoint)
            return done.returncode, done.stdout.decode(), done.stderr.decode()

        yield schedule


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("report", "0 2 * * *"), "a cron expression is an option, --cron '0 2 * * *'"),
        (("report", "hello", "*/5 * * * *"), "a cron expression is an option, --cron '*/5 * * * *'"),
        (("@daily", "report"), "a cron expression is an option, --cron '@daily'"),
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


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def loaded(tmp_path):
    """Write the file and load it."""

    def loaded(text):
        path = tmp_path / "schedules.toml"
        path.write_text(text)
        return load(path, NOW)

    return loaded


def test_a_file(loaded):
    nightly, tick = loaded("""
        [schedules.nightly]
        service = "report"
        cron = "30 2 * * *"
        timezone = "Europe/Berlin"
        missed = "all"
        body = ["all", "ü"]
        headers = { a = "b" }
        owner = "shop"
        priority = 3
        retries = 2
        backoff = 0.5
        ttl = "3d"

        [schedules."every/second"]
        service = "report"
        every = "5m"
    """)
    assert nightly._replace(body=b"") == (
        "nightly", "shop", "report", b"", '{"a": "b"}', 3, 2, 0.5, 259200.0, "30 2 * * *", None, "Europe/Berlin", "all",
        NOW, NOW + 17.5 * 3600,
    )  # fmt: skip
    assert unpack(nightly.body) == [b"all", "ü".encode()]
    assert (tick.name, tick.every, unpack(tick.body), tick.owner) == ("every/second", 300, [b""], "")


def test_an_empty_file_has_no_schedules(loaded):
    assert loaded("") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x", "Expected '=' after a key"),
        ("x = 1", r"expected tables \[schedules.NAME\], and nothing else"),
        ("schedules = 1", r"expected tables \[schedules.NAME\], and nothing else"),
        ("schedules.a = 1", r"schedules.a: expected a table with a service"),
        ("[schedules.a]\nevery = 5", "schedules.a: expected a table with a service"),
        ("[schedules.a]\nservice = 'r'", "schedules.a: a schedule needs either cron or every"),
        ("[schedules.a]\nservice = 'r'\nevery = 'soon'", "schedules.a: 'soon' is not a duration"),
        ("[schedules.a]\nservice = 'r'\nevery = true", "schedules.a: every is True: it must be a number of seconds"),
        ("[schedules.a]\nservice = 'r'\nevery = 5\ncolour = 1", "schedules.a: a schedule has no option 'colour'"),
        ("[schedules.a]\nservice = 'r'\nevery = 5\nbody = 1", "schedules.a: body must be text, or a list of texts"),
        ("[schedules.a]\nservice = 'r'\nevery = 5\nheaders = 1", "schedules.a: headers must map text to text"),
        ("[schedules.a]\nservice = 'r'\nevery = 5\nowner = ''", "schedules.a: owner must be text"),
        ("[schedules.'a b']\nservice = 'r'\nevery = 5", "schedules.a b: the schedule's name must be"),
        ("[schedules.a]\nservice = ''\nevery = 5", "schedules.a: "),
    ],
)
def test_invalid_files(loaded, text, problem):
    with pytest.raises(SettingError, match=problem):
        loaded(text)


def test_a_file_that_does_not_exist(tmp_path):
    done = run("titanic", "serve", "--schedules", str(tmp_path / "none.toml"), "--broker", free_endpoint())
    assert done.returncode == 2
    assert b"No such file or directory" in done.stderr
    with pytest.raises(SettingError, match="No such file"):
        load(tmp_path / "none.toml", time.time())
