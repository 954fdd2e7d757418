"""Two batches under one prefix: they serve the same, or the second one is refused."""

from contextlib import ExitStack

import pytest
from support.access import ROLES, Folder
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import free_endpoint
from support.sparks import LIMITS, result, running_batch

from zmdp.clients import Client
from zmdp.mdp.errors import SettingError
from zmdp.spark import drivers
from zmdp.testing import running_broker

ONE = '[tables.one]\nformat = "csv"'
OTHER = '[tables.other]\nformat = "csv"'


@pytest.fixture
def folders(tmp_path):
    found = [tmp_path / name for name in ("a", "b")]
    for each in found:
        each.mkdir()
    return found


def test_a_second_batch_with_another_catalogue_is_refused(spark, endpoint, folders):
    first, second = folders
    with Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS) as client:
        with running_batch(spark, endpoint, first, tables=ONE, name="first") as driver:
            with pytest.raises(
                SettingError, match=r"first already serves spark\.sql and spark\.job with another"
            ) as no:
                with running_batch(spark, endpoint, second, tables=OTHER, name="second"):
                    pass
            assert "choose another --prefix" in str(no.value)
            assert drivers.names(client) == ["first"]
            with running_batch(spark, endpoint, second, tables=OTHER, name="second", prefix="other"):
                assert result(client, "other.sql", "SELECT 1 AS a")[0]["rows"] == 1
            with running_batch(spark, endpoint, second, tables=ONE, name="second"):
                assert drivers.names(client) == ["first", "second"]
            driver.stop()
            with running_batch(spark, endpoint, second, tables=OTHER, name="second"):
                assert result(client, "spark.sql", "SELECT 1 AS a")[0]["rows"] == 1


def test_a_reload_tells_which_batches_differ_until_they_are_reloaded_too(spark, endpoint, folders, logged):
    first, second = folders
    with (
        running_batch(spark, endpoint, first, tables=ONE, name="first"),
        running_batch(spark, endpoint, second, tables=ONE, name="second") as driver,
    ):
        (second / "catalogue.toml").write_text(OTHER)
        driver.reload()
        assert logged("first serves the same names with another catalogue until it is reloaded too")


def test_of_two_batches_that_wait_for_the_same_broker_one_is_refused(spark, folders):
    at = free_endpoint()
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(running_batch(spark, at, folder, tables=tables, name=folder.name))
            for folder, tables in zip(folders, (ONE, OTHER), strict=True)
        ]
        stack.enter_context(running_broker(at, limits=LIMITS, drain_timeout=0.0))
        refusals = 0
        for driver in drivers:
            try:
                driver.serve()
            except SettingError:
                refusals += 1
        assert refusals


def test_a_batch_that_may_not_report_its_status_serves(spark, tmp_path, logged):
    access = Folder(tmp_path)
    access.write(ROLES.replace('offer = ["*"]\nmmi', 'offer = ["spark.sql", "spark.job", "spark.fetch.*"]\nmmi'))
    with access.broker(limits=LIMITS) as server, Client(server.endpoints[0], **access.settings("shop")) as client:
        with running_batch(spark, server.endpoints[0], tmp_path, tables=ONE, keys=access.keys("driver")):
            assert logged("is unknown: the broker does not know spark.control.batch: see its log")
            assert result(client, "spark.sql", "SELECT 1 AS a")[0]["rows"] == 1
