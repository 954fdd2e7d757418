"""One Spark session for all tests of this process.

`local[2,3]` means two cores and up to two failures per task; plain `local[2]` never retries.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.sparks import LIMITS, SMALL_JAVA, skip_without_java

from zmdp.spark import session as sessions
from zmdp.testing import running_broker

CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": SMALL_JAVA,
    "spark.driver.memory": "1g",
}
JARS = [
    Path("/usr/share/java/postgresql.jar"),  # Debian's
    Path(os.environ.get("ICEBERG_JAR", "no jar")),  # iceberg-spark-runtime for this version of Spark
]
if found := [str(each) for each in JARS if each.exists()]:
    CONF["spark.driver.extraClassPath"] = ":".join(found)


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    if find_spec("pyspark") and version("pyspark").startswith(
        ("4.0.", "4.1.")
    ):  # they leave sockets open, which their own collect() made
        for item in items:
            if str(item.path).startswith(here):
                for each in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
                    item.add_marker(pytest.mark.filterwarnings(f"ignore::{each}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if "java" in item.fixturenames:
        skip_without_java()  # here, because pytest reports what a fixture skips once for each test


@pytest.fixture(scope="session")
def java():
    """For tests that start Java themselves: they are skipped without it, as those on the session are."""


@pytest.fixture(scope="session")
def spark(java, tmp_path_factory):
    """The session that all tests of this process share."""
    folder = tmp_path_factory.mktemp("spark")
    conf = {**CONF, "spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder / "local")}
    made = sessions.open_session("tests", master="local[2,3]", conf=conf)
    yield made
    made.stop()


@pytest.fixture
def endpoint():
    """The endpoint of a broker."""
    with running_broker(limits=LIMITS, drain_timeout=0.0) as server:
        yield server.endpoints[0]
