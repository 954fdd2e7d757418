"""Imports between the packages of the product point one way, and cheap imports stay cheap."""

import pydoc
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from imports import SOURCES, below, graph, imports, package_of

import zmdp

MAX_MODULES = 15
TITANIC = {"titanic", "titanic.api"}


def test_the_modules_are_found():
    assert {"zmdp", "zmdp.version", "zmdp.mdp.errors", "zmdp.mdp.wire.commands", "zmdp.clients"} <= SOURCES.keys()
    assert ("zmdp.mdp.errors", "loaded") in imports("zmdp.mdp.limits")
    assert ("zmdp.clients", "types") in imports("zmdp")
    assert ("zmdp.mdp.wire.batch", "loaded") in imports("zmdp.workers.session.session")


def test_no_import_runs_up_the_order_of_the_architecture():
    """`python tests/imports.py` prints them all."""
    found, order = graph(), below()
    assert found.keys() == order.keys() | {"zmdp", "migrations.versions"}
    up = {
        f"{package} imports {target}"
        for package in order
        for target, times in found[package].items()
        if target not in order[package] | {"zmdp"} and times != {"types"}
    }
    assert up == set()


def test_no_module_imports_itself_while_it_is_loaded():
    graph = {}
    for name in SOURCES:
        loaded = {target for target, when in imports(name) if when == "loaded"}
        # Importing a module first loads the packages around it.  Those around the importer are already being loaded.
        around = {".".join(each.split(".")[:depth]) for each in loaded for depth in range(1, each.count(".") + 1)}
        graph[name] = (loaded | {each for each in around if not f"{name}.".startswith(f"{each}.")}) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_files_import_each_other():
    """Not even in a circle of imports that are made later, or for types only."""
    graph = {name: {target for target, _ in imports(name)} - {name} for name in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_folder_has_more_modules_than_a_reader_takes_in():
    many = Counter(path.parent for path in SOURCES.values() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in many.items() if count > MAX_MODULES} == {}


def loaded_by(statement):
    """Return the modules that a new interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_errors_loads_neither_sockets_nor_the_broker():
    loaded = loaded_by("import zmdp.mdp.errors")
    assert "zmdp.mdp.errors" in loaded
    assert not [name for name in loaded if name.split(".")[0] in {"zmq", "socket", "click", "sqlalchemy"}]
    ours = {name for name in loaded if name.startswith("zmdp")}
    assert ours == {"zmdp", "zmdp.version", "zmdp.mdp", "zmdp.mdp.errors"}


def test_importing_the_package_loads_no_subpackage():
    assert {name for name in loaded_by("import zmdp") if name.startswith("zmdp")} == {"zmdp", "zmdp.version"}


@pytest.mark.parametrize("statement", ["from zmdp import Client, AsyncClient", "import zmdp.clients.command.main"])
def test_importing_a_client_loads_no_workers_titanic_or_broker(statement):
    packages = {package_of(name) for name in loaded_by(statement) if name in SOURCES}
    assert "clients" in packages
    assert not packages & ({"workers", "titanic.db", "mdp.broker", "mmi", "spark"} | TITANIC)


@pytest.mark.parametrize(
    "statement", ["from zmdp import Client, AsyncClient", "import zmdp.clients.rows", "import zmdp.spark"]
)
def test_what_some_users_lack_is_not_imported(statement):
    assert not {"pyarrow", "pyspark", "pandas"} & loaded_by(statement)


@pytest.mark.parametrize("statement", ["from zmdp import Worker, AsyncWorker", "import zmdp.workers.command.cli"])
def test_importing_a_worker_loads_no_clients_titanic_or_broker(statement):
    packages = {package_of(name) for name in loaded_by(statement) if name in SOURCES}
    assert "workers" in packages
    assert not packages & ({"clients", "titanic.db", "mdp.broker", "mmi", "spark"} | TITANIC)


def test_callers_of_titanic_do_not_load_its_database():
    loaded = loaded_by("from zmdp import Titanic, AsyncTitanic")
    assert "zmdp.titanic.api.client" in loaded
    assert not [name for name in loaded if name.split(".")[0] in {"sqlalchemy", "alembic"}]


def test_the_help_of_the_package_names_the_public_classes():
    public = {name for name in zmdp.__all__ if name != "__version__"}
    assert public == {
        "AsyncClient", "AsyncTitanic", "AsyncWorker", "Client", "Limit", "Retry", "Service", "ServiceError", "Services",
        "Streaming", "Titanic", "Tool", "Worker",
    }  # fmt: skip
    page = pydoc.plain(pydoc.render_doc(zmdp))
    classes = page.partition("\nCLASSES\n")[2]
    for name in public:
        assert f"`{name}`" in zmdp.__doc__
        assert f"class {name}(" in classes
