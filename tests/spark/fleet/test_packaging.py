"""What is shipped to executors: the package as a zip, an environment as an archive."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.processes import run

from zmdp.mdp.errors import SettingError
from zmdp.spark.fleet import packaging
from zmdp.spark.fleet.packaging import Cluster, PackError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(tmp_path):
    packaging.write_package(tmp_path / "zmdp.zip")
    return tmp_path / "zmdp.zip"


def python(code, *paths):
    """Run code with only the standard library, pyzmq and these paths; return what it prints."""
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
    assert {"zmdp/__init__.py", "zmdp/spark/log4j2.properties", "pyspark_titanic.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_executors_can_import_from_the_package(package):
    code = "import zmdp.workers, zmdp.clients, zmdp.spark.fleet.executor as w; print(w.__file__)"
    assert python(code, package) == f"{package}/zmdp/spark/fleet/executor.py"


def test_the_executor_module_imports_only_the_standard_library(package):
    code = "import zmdp.spark.fleet.executor; print([n for n in ('zmq', 'click', 'pyspark') if n in sys.modules])"
    assert python(code, package) == "[]"


def test_a_package_can_be_created_from_a_package(package, tmp_path):
    again = tmp_path / "again.zip"
    code = f"import pathlib; from zmdp.spark.fleet.packaging import write_package as w; w(pathlib.Path({str(again)!r}))"
    python(code, package)
    before, after = zipfile.ZipFile(package), zipfile.ZipFile(again)
    assert before.namelist() == after.namelist()
    assert [before.read(name) for name in before.namelist()] == [after.read(name) for name in after.namelist()]


def test_no_compiled_module_is_shipped(package):
    names = zipfile.ZipFile(package).namelist()
    assert "zmdp/mdp/broker/machine.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_pack_without_an_environment(tmp_path):
    done = run("mdp-spark", "pack", str(tmp_path / "new" / "folder"), "--no-environment")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["main.py", "zmdp.zip"]
    assert (
        f"spark-submit --py-files {tmp_path}/new/folder/zmdp.zip {tmp_path}/new/folder/main.py" in done.stdout.decode()
    )


def test_the_launcher_runs_the_command(package, tmp_path):
    packaging.pack(tmp_path, requirements=(), environment=False)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", "fleet", "--help"],
        env={"PYTHONPATH": str(package)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "MODULE:FUNCTION" in done.stdout


@pytest.mark.spark_long
def test_an_environment_runs_elsewhere_with_its_requirements(package, tmp_path):
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("msgpack\n")
    packaging.write_environment(tmp_path / "e.tar.gz", [*packaging.base_requirements(), f"-r {wanted}"])
    with tarfile.open(tmp_path / "e.tar.gz") as archive:
        assert not [name for name in archive.getnames() if "__pycache__" in name or "/pip/" in name]
    (tmp_path / "elsewhere").mkdir()
    unpack = ["tar", "-xzf", tmp_path / "e.tar.gz", "-C", tmp_path / "elsewhere"]  # as Spark does
    subprocess.run(unpack, check=True)
    code = "import zmdp.workers, zmq, msgpack, click; print(zmq.__file__)"
    command = [tmp_path / "elsewhere" / "bin" / "python", "-c", code]
    env = {"PYTHONPATH": str(package)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "elsewhere"))


@pytest.mark.spark_long
def test_a_failure_of_pip_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PackError, match=r"pip could not install pyzmq==0.0.1: ERROR: .*pyzmq==0.0.1"):
        packaging.write_environment(tmp_path / "e.tar.gz", ["pyzmq==0.0.1"])
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("mdp-spark", "pack", str(tmp_path / "file" / "x"), "--no-environment")
    assert done.returncode == 1
    assert done.stderr.decode() == f"mdp-spark: cannot write {tmp_path}/file/x: Not a directory\n"


def test_requirements_without_an_environment_are_refused(tmp_path):
    done = run("mdp-spark", "pack", str(tmp_path), "--no-environment", "--requirement", "numpy")
    assert done.returncode == 2
    assert "--requirement cannot be combined with --no-environment" in done.stderr.decode()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"py_files": ("no.py",)}, "no such file: no.py"),
        ({"archive": "no.tar.gz#e"}, "no such file: no.tar.gz#e"),
        ({"py_files": ("HERE/x.whl",)}, "Spark ignores wheels"),
        ({"archive": "HERE/x.whl", "master": "local[2]"}, "--archive needs executors in separate processes"),
    ],
)
def test_invalid_files_are_refused_before_spark_starts(tmp_path, settings, why):
    (tmp_path / "x.whl").write_text("")
    here = {
        name: tuple(each.replace("HERE", str(tmp_path)) for each in value)
        if isinstance(value, tuple)
        else value.replace("HERE", str(tmp_path))
        for name, value in settings.items()
    }
    with pytest.raises(SettingError, match=re.escape(why)):
        Cluster(**here).open("test")


def test_settings_of_the_session():
    settings = Cluster(master="spark://h:7077", archive="e.tar.gz", dynamic=True)._settings(3)
    assert settings["spark.archives"] == "e.tar.gz#environment"
    assert settings["spark.pyspark.python"] == "./environment/bin/python"
    assert settings["spark.dynamicAllocation.maxExecutors"] == "3"
    assert settings["spark.speculation"] == "false"


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("lib/python3.11/site-packages/pip", False),
        ("lib/python3.11/site-packages/pip-25.0.1.dist-info", False),
        ("bin/pip3.11", False),
        ("lib/python3.11/site-packages/zmq/__pycache__", False),
        ("lib/python3.11/site-packages/sklearn/pipeline.py", True),
        ("lib/python3.11/site-packages/pipelines", True),
        ("lib/python3.11/site-packages/a/pip", True),
        ("bin/python", True),
    ],
)
def test_files_of_an_environment_that_are_shipped(name, shipped):
    assert (packaging._executor_needs(tarfile.TarInfo(name)) is not None) is shipped
