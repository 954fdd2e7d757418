"""Imports between the packages of the product point one way, and cheap imports stay cheap."""

import pydoc
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
from imports import SOURCES, below, imports, package_of

import zmdp

LEAVES = {"zmdp", "mdp", "mdp.wire", "mdp.transport", "mdp.services"}
"""The packages that every program may use: errors, limits, frames, sockets."""
CALLERS = LEAVES | {"clients", "workers", "mdp.cli"}
DECLARED = {"titanic.frames", "titanic.schedules", "titanic.submission", "titanic.uuids"}
"""The modules of Titanic that its clients and its SQL share."""
TITANIC = DECLARED | {"titanic"}

ALLOWED = {
    "zmdp": {
        "clients",
        "mdp.services",
        "workers",
        "workers.services",
        "titanic",
    },  # the public names, imported when they are first used
    "mdp": {"zmdp"},
    "mdp.wire": {"zmdp", "mdp"},
    "mdp.services": {"mdp", "mdp.wire"},
    "mdp.transport": {"zmdp", "mdp", "mdp.wire"},
    "mmi": {"zmdp", "mdp", "mdp.wire"},
    "mdp.http": LEAVES,
    "clients.dashboard": LEAVES | {"clients", "mdp.http"},
    "mdp.broker": LEAVES | {"mmi"},
    "mdp.cli": LEAVES | {"mdp.broker"},
    "testing": LEAVES | {"mdp.broker", "clients", "workers", "workers.services", "titanic"},
    "clients": LEAVES | {"mdp.cli", "clients.rows"},
    "clients.rows": LEAVES,
    "clients.freelance": LEAVES | {"clients"},
    "clients.cli": LEAVES | {"mdp.cli", "clients", "clients.freelance"},
    "clients.gateways": CALLERS,
    "clients.gateways.flux": CALLERS | {"clients.gateways"},
    "clients.gateways.http": CALLERS | {"clients.gateways", "mdp.http"} | TITANIC,
    "workers": LEAVES,
    "workers.services": LEAVES | {"workers"},
    "workers.freelance": LEAVES | {"workers"},
    "workers.cli": LEAVES | {"mdp.cli", "clients", "workers", "workers.freelance", "workers.services"},
    "titanic.frames": set(),
    "titanic.uuids": set(),
    "titanic.submission": LEAVES | {"titanic.frames", "titanic.uuids"},
    "titanic.schedules": LEAVES | {"titanic.submission", "titanic.uuids"},
    "titanic.store": {"mdp", "mdp.services"} | DECLARED,
    "titanic": CALLERS | {"clients.rows", "workers.services", "titanic.store"} | DECLARED,
    "titanic.arrow": CALLERS | {"titanic.store"} | TITANIC,
    "migrations": {"titanic.store"} | TITANIC,
    "titanic.web": CALLERS | {"mdp.http", "clients.dashboard", "titanic.store"} | TITANIC,
    "titanic.cli": CALLERS | {"titanic.arrow", "titanic.store", "titanic.web"} | TITANIC,
    "spark": CALLERS | {"titanic.store", "titanic.cli"} | TITANIC,
    "spark.client": LEAVES | {"clients"} | TITANIC,
    "spark.batch": CALLERS | {"titanic.cli", "spark", "spark.client"} | TITANIC,
    "spark.fleet": CALLERS | {"titanic.cli", "spark", "spark.batch"},
    "spark.pipeline": CALLERS | {"clients.rows", "spark"} | TITANIC,
    "spark.datasource": CALLERS | {"titanic.store", "titanic.arrow", "spark"} | TITANIC,
}
"""The packages from which each package may import, at any time and for any purpose, named without `zmdp.`; a package
does not include those inside it."""
TYPES = {"mmi": {"mdp.broker"}}
"""The packages whose types each package names besides, and from which it imports nothing when it runs."""


def test_the_modules_are_found():
    assert {"zmdp", "zmdp.pure", "zmdp.mdp.errors", "zmdp.mdp.wire.commands", "zmdp.clients"} <= SOURCES.keys()
    assert ("zmdp.mdp.errors", "loaded") in imports("zmdp.mdp.limits")
    assert ("zmdp.clients", "types") in imports("zmdp")
    assert ("zmdp.mdp.wire.batch", "loaded") in imports("zmdp.workers.session")


def test_every_package_has_its_rule():
    assert {package_of(name) for name in SOURCES} == ALLOWED.keys() | {"migrations.versions"}


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_package_imports_only_from_packages_below_it(folder):
    allowed = ALLOWED[folder] | {folder}
    named = allowed | TYPES.get(folder, set())
    wrong = [
        f"{name} imports {target}"
        for name in SOURCES
        if package_of(name) == folder
        for target, when in imports(name)
        if package_of(target) not in (named if when == "types" else allowed)
    ]
    assert wrong == []


def test_no_rule_runs_up_the_order_of_the_architecture():
    """So no import does: `python tests/imports.py` prints them all."""
    order = below()
    assert order.keys() == ALLOWED.keys() - {"zmdp"}
    up = {folder: ALLOWED[folder] - order[folder] - {"zmdp"} for folder in order}
    assert {folder: targets for folder, targets in up.items() if targets} == {}


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
    assert ours == {"zmdp", "zmdp.pure", "zmdp.mdp", "zmdp.mdp.errors"}


def test_importing_the_package_loads_no_subpackage():
    assert {name for name in loaded_by("import zmdp") if name.startswith("zmdp")} == {"zmdp", "zmdp.pure"}


@pytest.mark.parametrize("statement", ["from zmdp import Client, AsyncClient", "import zmdp.clients.cli.main"])
def test_importing_a_client_loads_no_workers_titanic_or_broker(statement):
    packages = {package_of(name) for name in loaded_by(statement) if name in SOURCES}
    assert "clients" in packages
    assert not packages & ({"workers", "titanic.store", "mdp.broker", "mmi", "spark"} | TITANIC)


@pytest.mark.parametrize(
    "statement", ["from zmdp import Client, AsyncClient", "import zmdp.clients.rows", "import zmdp.spark"]
)
def test_what_some_users_lack_is_not_imported(statement):
    assert not {"pyarrow", "pyspark", "pandas"} & loaded_by(statement)


@pytest.mark.parametrize("statement", ["from zmdp import Worker, AsyncWorker", "import zmdp.workers.cli.main"])
def test_importing_a_worker_loads_no_clients_titanic_or_broker(statement):
    packages = {package_of(name) for name in loaded_by(statement) if name in SOURCES}
    assert "workers" in packages
    assert not packages & ({"clients", "titanic.store", "mdp.broker", "mmi", "spark"} | TITANIC)


def test_callers_of_titanic_do_not_load_its_database():
    loaded = loaded_by("from zmdp import Titanic, AsyncTitanic")
    assert "zmdp.titanic.client" in loaded
    assert not [name for name in loaded if name.split(".")[0] in {"sqlalchemy", "alembic"}]


def test_the_help_of_the_package_names_the_public_classes():
    public = {name for name in zmdp.__all__ if name != "__version__"}
    assert public == {
        "AsyncClient", "AsyncTitanic", "AsyncWorker", "Client", "Retry", "Service", "ServiceError", "Services",
        "Streaming", "Titanic", "Worker",
    }  # fmt: skip
    page = pydoc.plain(pydoc.render_doc(zmdp))
    classes = page.partition("\nCLASSES\n")[2]
    for name in public:
        assert f"`{name}`" in zmdp.__doc__
        assert f"class {name}(" in classes
