"""`mdp-spark batch` as a process: checking its catalogue, and reloading it on a signal."""

import signal

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import broker, process, run
from support.sparks import QUICK

from zmdp.clients import Client, ServiceError

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]
SMALL = (
    "--master", "local[1]", "--conf", "spark.ui.enabled=false",
    "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)  # fmt: skip
PEOPLE = """
    [tables.people]
    format = "csv"
    path = "people.csv"
    schema = "name string"
"""


@pytest.mark.long  # test_catalogue.py has the same checks, in this process
def test_check_prints_a_line_for_each_and_exits_with_1_if_one_fails(tmp_path):
    config = tmp_path / "catalogue.toml"
    config.write_text(f"{PEOPLE}\n[tables.missing]\nformat = 'csv'\npath = 'missing'\n[jobs]\none = 'some_jobs:one'")
    (tmp_path / "people.csv").write_text("ann\n")
    (tmp_path / "some_jobs.py").write_text("def one(spark, n: int = 1): return n\n")
    done = run("mdp-spark", "batch", "--check", "--config", str(config), *SMALL, timeout=SPARK_TIMEOUT_SECONDS)
    first, second, third, *others = done.stdout.decode().splitlines()
    assert first == "ok       table people: name:string"
    assert second.startswith("failed   table missing: [PATH_NOT_FOUND]")
    assert third == "ok       job one: takes (n: int = 1)"
    assert all("job " in line for line in others)  # of installed packages
    assert (done.returncode, "Traceback" in done.stderr.decode()) == (1, False), done.stderr.decode()


@pytest.mark.long
def test_sighup_reloads_and_an_invalid_file_changes_nothing(tmp_path):
    config = tmp_path / "catalogue.toml"
    config.write_text(PEOPLE)
    (tmp_path / "people.csv").write_text("ann\n")
    with (
        broker(*QUICK) as (_, at),
        process("mdp-spark", "batch", "--broker", at, "--config", str(config), *SMALL, *QUICK, cwd=tmp_path) as batch,
        Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client,
    ):
        batch.line("serving spark.sql and spark.job", timeout=SPARK_TIMEOUT_SECONDS)
        config.write_text("tables = 3")
        batch.send_signal(signal.SIGHUP)
        batch.line("not reloaded: ")
        assert client.request("spark.sql", b"SELECT * FROM people")[-1] == b'[{"name":"ann"}]'
        config.write_text(PEOPLE.replace("people]", "persons]"))
        batch.send_signal(signal.SIGHUP)
        batch.line("reloaded; tables: 1, catalogs: 0, ")
        assert client.request("spark.sql", b"SELECT * FROM persons")[-1] == b'[{"name":"ann"}]'
        with pytest.raises(ServiceError, match="TABLE_OR_VIEW_NOT_FOUND"):
            client.request("spark.sql", b"SELECT * FROM people")
        assert batch.end() == 0
