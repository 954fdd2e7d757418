"""The settings of fleets, and how many cores a cluster has, without Spark."""

import re
from types import SimpleNamespace

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.spark.fleet.cluster import Cluster, cores
from zmdp.spark.fleet.doctor import is_loopback
from zmdp.spark.fleet.driver import Fleet
from zmdp.spark.fleet.settings import FleetSettings


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"handler": "module"}, "'module': expected MODULE:FUNCTION"),
        ({"handler": "module:"}, "expected MODULE:FUNCTION"),
        ({"service": "mmi.x"}, "'mmi.x' is a reserved name"),
        ({"service": "spark.control.x"}, "'spark.control.x' is a reserved name"),
        ({"service": ""}, "service"),
        ({"name": "a name"}, "'a name' is not a valid name"),
        ({"minimum": 3, "maximum": 2}, "--min 3 --max 2"),
    ],
)
def test_invalid_settings_are_refused(settings, why):
    with pytest.raises(SettingError, match=re.escape(why)):
        FleetSettings(**{"handler": "m:f", "service": "s", "name": "n", **settings})


def test_loopback_addresses():
    assert all(map(is_loopback, ["tcp://127.0.0.1:5555", "tcp://localhost:1", "ipc:///run/b", "tcp://[::1]:5"]))
    assert not any(map(is_loopback, ["tcp://10.0.0.1:5555", "tcp://broker:5555"]))


class Conf(dict):
    """The part of a SparkContext that tells its cores."""

    defaultParallelism = 9  # noqa: N815 - Spark's name; the setting spark.default.parallelism

    def __init__(self, master, **conf):
        super().__init__({f"spark.{name.replace('_', '.')}": value for name, value in conf.items()})
        self.master = master
        count = {"totalCores": lambda: 4} if master.startswith("local") else {"totalCoreCount": lambda: 5}
        backend = SimpleNamespace(**count)
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(schedulerBackend=lambda: backend))

    def getConf(self):  # noqa: N802
        return self


@pytest.mark.parametrize(
    ("context", "number"),
    [
        (Conf("local[*]"), 4),
        (Conf("local[*]", dynamicAllocation_enabled="true"), 4),
        (Conf("local-cluster[3,2,1024]"), 6),
        (Conf("spark://h:7077"), 5),
        (Conf("spark://h:7077", cores_max="8"), 5),  # what it has, not what it may have
        (Conf("yarn", **{"dynamicAllocation_enabled": "true", "dynamicAllocation_maxExecutors": "3"}), 3),
    ],
)
def test_the_cores_of_a_cluster(context, number):
    assert cores(context) == number


def test_an_unlimited_cluster_needs_a_maximum():
    with pytest.raises(SettingError, match="set one with --max"):
        cores(Conf("yarn", dynamicAllocation_enabled="true"))


def test_a_fleet_says_that_spark_has_not_started_yet():
    fleet = Fleet(FleetSettings("m:f", "s", "n"), Cluster())
    assert fleet.unfinished() == "the start of Spark"
