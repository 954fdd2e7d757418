"""What is shipped to executors: the package as a zip, an environment as an archive; the settings of the session."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import environment

from zmdp.mdp.errors import SettingError
from zmdp.spark.fleet.cluster import Cluster, write_package

ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(tmp_path):
    write_package(tmp_path / "zmdp.zip")
    return tmp_path / "zmdp.zip"


def python(code, *paths):
    """Run code with only the standard library, pyzmq, msgspec and these paths; return what it prints."""
    import zmq

    lines = [f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}", code]
    env = {"PYTHONPATH": str(Path(zmq.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(lines)], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_package_has_every_source_file_and_nothing_generated(package):
    names = set(zipfile.ZipFile(package).namelist())
    for folder in ("mdp", "mmi", "clients", "workers", "titanic", "spark", "migrations"):
        assert {f"zmdp/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")} <= names
    assert {"zmdp/__init__.py", "zmdp/spark/log4j2.properties"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_executors_need_only_pyzmq_and_msgspec(package):
    others = {"click", "pandas", "pyarrow", "pyspark", "sqlalchemy"}
    code = f"import zmdp.workers, zmdp.spark.fleet.executor as w; print(w.__file__, [*{others} & sys.modules.keys()])"
    assert python(code, package) == f"{package}/zmdp/spark/fleet/executor.py []"


def test_a_package_can_be_created_from_a_package(package, tmp_path):
    again = tmp_path / "again.zip"
    code = f"import pathlib; from zmdp.spark.fleet.cluster import write_package as w; w(pathlib.Path({str(again)!r}))"
    python(code, package)
    before, after = zipfile.ZipFile(package), zipfile.ZipFile(again)
    assert before.namelist() == after.namelist()
    assert [before.read(name) for name in before.namelist()] == [after.read(name) for name in after.namelist()]


@pytest.mark.long
def test_an_environment_made_by_venv_pack_runs_elsewhere(package, tmp_path):
    environment.make(tmp_path / "e.tar.gz", "msgpack")
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["tar", "-xzf", tmp_path / "e.tar.gz", "-C", tmp_path / "elsewhere"], check=True)  # as Spark does
    code = "import zmdp.workers, zmq, msgpack; print(zmq.__file__)"
    command = [tmp_path / "elsewhere" / "bin" / "python", "-c", code]
    env = {"PYTHONPATH": str(package)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"py_files": ("no.py",)}, "no such file: no.py"),
        ({"archive": "no.tar.gz#e"}, "no such file: no.tar.gz#e"),
        ({"py_files": (f"{__file__}#x.whl",)}, "Spark ignores wheels"),
        ({"archive": __file__, "master": "local[2]"}, "--archive needs executors in separate processes"),
    ],
)
def test_invalid_files_are_refused_before_spark_starts(given, why):
    with pytest.raises(SettingError, match=re.escape(why)):
        Cluster(**given).open("test")


def settings(slots=None, reserve=1, master="spark://h:7077", **given):
    return Cluster(master=master, **given)._settings(master, slots, reserve)


def test_settings_of_the_session():
    found = settings(2, archive="e.tar.gz", dynamic=True)
    assert found["spark.archives"] == "e.tar.gz#environment"
    assert found["spark.pyspark.python"] == "./environment/bin/python"
    assert found["spark.dynamicAllocation.maxExecutors"] == "3"
    assert found["spark.speculation"] == "false"


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"slots": 2}, "3"),
        ({"slots": 2, "reserve": 0}, "2"),
        ({"slots": 2, "conf": {"spark.task.cpus": "2"}}, "5"),
        ({"slots": 2, "conf": {"spark.executor.cores": "4"}}, "4"),  # an executor has all its cores, or does not start
        ({"slots": 2, "dynamic": True}, "3"),
        ({}, None),
        ({"slots": 2, "master": "yarn"}, None),
    ],
)
def test_a_fleet_takes_no_more_cores_of_a_standalone_cluster_than_it_needs(given, most):
    assert settings(**given).get("spark.cores.max") == most


def test_settings_that_are_no_numbers(tmp_path):
    with pytest.raises(SettingError, match=r"spark\.task\.cpus=many: expected a whole number greater than 0"):
        Cluster("spark://h:7077", {"spark.task.cpus": "many"}).open("test", slots=1)
