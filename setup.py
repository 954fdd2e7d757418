"""Build the optional compiled modules; everything else is in pyproject.toml.

Cython compiles `CYTHON`, of which `batch.py` also runs uncompiled; mypyc compiles `MACHINES`, which all do.  If a
compiler is missing or fails, the build continues in pure Python and says so; with `ZMDP_PURE=0` it fails, so that a
release has no wheel that is less than its name says.  With `ZMDP_PURE=1` nothing is compiled; `mdp-broker --version`
reports what is in use.  `MYPYC_OPT_LEVEL` is the C compiler's -O for the machines: with 0, tests start sooner.
"""

import os
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from sysconfig import get_config_var

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
STAGE = Path("build", "machines")
"""Compilers derive a module's name from its path, so here the folders have their installed names."""
FOLDERS = {
    "zmdp": "src/zmdp",
    "zmdp/mdp": "mdp",
    "zmdp/mmi": "mmi",
    "zmdp/clients": "clients",
    "zmdp/workers": "workers",
}
CYTHON = ["zmdp/mdp/transport/multipart_cython.pyx", "zmdp/mdp/wire/batch.py"]
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
"""The setuptools commands that compile.  pip runs others only for the metadata, which should be fast."""
PURE = os.environ.get("ZMDP_PURE", "")
MACHINES = [
    "zmdp/clients/broker_connection.py",
    "zmdp/clients/call.py",
    "zmdp/clients/failover.py",
    "zmdp/clients/session.py",
    "zmdp/workers/credit.py",
    "zmdp/workers/heartbeats.py",
    "zmdp/workers/held.py",
    "zmdp/workers/outgoing.py",
    "zmdp/workers/session.py",
    "zmdp/mdp/broker/abouts.py",
    "zmdp/mdp/broker/admission.py",
    "zmdp/mdp/broker/announcements.py",
    "zmdp/mdp/broker/backlog.py",
    "zmdp/mdp/broker/client_dialog.py",
    "zmdp/mdp/broker/connections.py",
    "zmdp/mdp/broker/delivery.py",
    "zmdp/mdp/broker/directory.py",
    "zmdp/mdp/broker/door.py",
    "zmdp/mdp/broker/drops.py",
    "zmdp/mdp/broker/endings.py",
    "zmdp/mdp/broker/events.py",
    "zmdp/mdp/broker/failures.py",
    "zmdp/mdp/broker/given_up.py",
    "zmdp/mdp/broker/journal.py",
    "zmdp/mdp/broker/link_dialog.py",
    "zmdp/mdp/broker/link_ports.py",
    "zmdp/mdp/broker/links.py",
    "zmdp/mdp/broker/machine.py",
    "zmdp/mdp/broker/metrics.py",
    "zmdp/mdp/broker/outbox.py",
    "zmdp/mdp/broker/outgoing.py",
    "zmdp/mdp/broker/ports.py",
    "zmdp/mdp/broker/records.py",
    "zmdp/mdp/broker/registry.py",
    "zmdp/mdp/broker/requests.py",
    "zmdp/mdp/broker/roles.py",
    "zmdp/mdp/broker/scheduling.py",
    "zmdp/mdp/broker/server.py",
    "zmdp/mdp/broker/shared.py",
    "zmdp/mdp/broker/sockets.py",
    "zmdp/mdp/broker/tails.py",
    "zmdp/mdp/broker/watch.py",
    "zmdp/mdp/broker/worker_dialog.py",
    "zmdp/mdp/histogram.py",
    "zmdp/mdp/linked_lists.py",
    "zmdp/mdp/timers.py",
    "zmdp/mdp/wire/commands.py",
    "zmdp/mdp/wire/envelope.py",
    "zmdp/mdp/wire/messages.py",
    "zmdp/mdp/wire/mdp.py",
    "zmdp/mdp/wire/names.py",
    "zmdp/mdp/wire/options.py",
    "zmdp/mdp/wire/pirate.py",
    "zmdp/mdp/wire/value.py",
    "zmdp/mdp/wire/x1.py",
]


def extensions() -> list[Extension]:
    """Return everything that can be compiled here."""
    if PURE not in {"", "0"} or COMPILING.isdisjoint(sys.argv):
        return []
    try:
        _check_compiler()
        _stage()
        return [*_cython(), *_machines()]
    except (Exception, SystemExit) as error:  # whatever is missing or fails, pure Python works
        _continue_without(error)
        return []


def _continue_without(error: BaseException) -> None:
    """Say that nothing is compiled, unless the environment demands that everything is."""
    if PURE == "0":
        error.add_note(_reason(error))
        raise error
    print(f"zmdp: nothing is compiled, so it runs in pure Python: {_reason(error)}", file=sys.stderr)


def _reason(error: BaseException) -> str:
    compiler, *_ = str(os.environ.get("CC") or get_config_var("CC") or "cc").split()
    if os.name == "posix" and shutil.which(compiler) is None:
        install = "install one (on Debian, `apt-get install gcc python3-dev`), and install zmdp again"
        return f"there is no C compiler {compiler}: {install}"
    return repr(error)


def _check_compiler() -> None:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("check.c").write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit_check(void) { return NULL; }\n")
        command = build_ext(Distribution())
        command.extensions = [Extension("check", ["check.c"])]
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        command.run()


def _stage() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    for name, folder in FOLDERS.items():
        for source in (HERE / folder).rglob("*.p*"):
            if source.suffix in {".py", ".pyx", ".pxd"}:
                staged = STAGE / name / source.relative_to(HERE / folder)
                staged.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, staged)
    shutil.copy2(HERE / "src/zmdp/py.typed", STAGE / "zmdp")


def _cython() -> list[Extension]:
    from Cython.Build import cythonize

    with chdir(STAGE):
        return [_moved(each) for each in cythonize(CYTHON)]


def _machines() -> list[Extension]:
    from mypyc.build import mypycify

    with chdir(STAGE):
        return [
            _moved(each)
            for each in mypycify(
                ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *MACHINES],
                opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),
                debug_level="0",
                group_name="zmdp.machines",
            )
        ]


def _moved(extension: Extension) -> Extension:
    """Return an extension with its paths relative to this folder, and without mypyc's -Werror.

    Other libraries need none of its symbols, but Python's entry point.  Hidden, functions that are called from within
    can be inlined, and are called directly.
    """
    extension.extra_compile_args = [each for each in extension.extra_compile_args if each != "-Werror"]
    if os.name == "posix":
        extension.extra_compile_args.append("-fvisibility=hidden")
    extension.sources = [str(STAGE / source) for source in extension.sources]
    extension.depends = [str(STAGE / source) for source in extension.depends]
    extension.include_dirs = [each if os.path.isabs(each) else str(STAGE / each) for each in extension.include_dirs]
    return extension


class build_compiled(build_ext):  # noqa: N801 - named as setuptools names them
    """Compiles all modules or none: modules of a build that failed halfway would not fit together."""

    def run(self) -> None:  # noqa: D102
        try:
            super().run()
        except Exception as error:  # the compiler is there, but something else is missing
            _continue_without(error)
            for output in self.get_outputs():
                Path(output).unlink(missing_ok=True)
            self.extensions = []


setup(ext_modules=extensions(), cmdclass={"build_ext": build_compiled})
