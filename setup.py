"""Find the packages, and build the optional compiled modules; everything else is in pyproject.toml.

Cython compiles `CYTHON`, of which `batch.py` also runs uncompiled; mypyc compiles `machines`, which all do.  If a
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

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
STAGE = Path("build", "machines")
"""Compilers derive a module's name from its path, so here the folders have their installed names."""
FOUND = find_packages(str(HERE))
"""The product's folders.  They are installed under one name: `clients` would shadow a user's own package."""
FOLDERS = {"zmdp": "src/zmdp", **{f"zmdp.{name}": name.replace(".", "/") for name in FOUND}}
CYTHON = ["zmdp/mdp/transport/multipart_cython.pyx", "zmdp/mdp/wire/batch.py"]
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
"""The setuptools commands that compile.  pip runs others only for the metadata, which should be fast."""
PURE = os.environ.get("ZMDP_PURE", "")
UNCOMPILED = {"__init__", "gate"}
"""Modules of the broker that mypyc cannot compile, because a base class is not compiled."""
BROKER = sorted({path.parent.relative_to(HERE).as_posix() for path in HERE.glob("mdp/broker/**/*.py")})
"""The rooms of the broker."""


def machines() -> list[str]:
    """Return the modules that mypyc compiles: the broker, the wire, and what costs time in clients and workers."""
    names = {
        "mdp": ["backoff", "histogram", "timers"],
        **{room: sorted({path.stem for path in HERE.glob(f"{room}/*.py")} - UNCOMPILED) for room in BROKER},
        "mdp/wire": [path.stem for path in HERE.glob("mdp/wire/[!_]*.py") if not path.with_suffix(".pxd").exists()],
        "mdp/transport": ["failover"],
        "clients/calls": ["ask"],
        "clients/x1": ["broker_connection", "client_connection", "dialog", "errors", "session"],
        "workers": ["aio_connection", "connection", "threaded"],
        "workers/session": ["heartbeats", "held", "outgoing", "session"],
        "interop/freelance/worker": ["servers", "session"],
    }
    return [f"zmdp/{folder}/{name}.py" for folder, found in names.items() for name in found]


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
        staged = STAGE / name.replace(".", "/")
        staged.mkdir(parents=True)
        for source in (HERE / folder).glob("*.p*"):
            if source.suffix in {".py", ".pyx", ".pxd"}:
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
                ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *machines()],
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


setup(
    packages=[*find_packages(str(HERE / "src")), *(f"zmdp.{name}" for name in FOUND)],
    package_dir={"": "src", **FOLDERS},
    ext_modules=extensions(),
    cmdclass={"build_ext": build_compiled},
)
