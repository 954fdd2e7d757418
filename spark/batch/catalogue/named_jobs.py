"""Named jobs: Python functions of the catalogue, the command line and installed packages, which callers may run."""

import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any, Final

from ....mdp.errors import SettingError
from ....mdp.program.loading import load

ENTRY_POINTS: Final = "zmdp.spark.jobs"
"""Group of entry points through which installed packages offer jobs."""
MAX_DESCRIPTION: Final = 2000
"""Characters of a job's docstring, and of its parameters, that callers are told."""


def job_targets(allowed: Mapping[str, str]) -> dict[str, str]:
    """Return the jobs that callers may run: those of installed packages (entry points), overridden by `allowed`."""
    return {each.name: each.value for each in entry_points(group=ENTRY_POINTS)} | dict(allowed)


def load_jobs(allowed: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Load the jobs that `job_targets` returns.  Raises as `load_job`."""
    return {name: load_job(name, target) for name, target in job_targets(allowed).items()}


def load_job(name: str, target: str) -> Callable[..., Any]:
    """Load a job.  Raises `SettingError` if it cannot be imported or is not a function that takes a session."""
    found = load(target, "MODULE:FUNCTION, for example yourpackage.jobs:wordcount")
    if not callable(found):
        raise SettingError(f"job {name!r}: {target} is a {type(found).__name__}, not a function")
    if not list(inspect.signature(found).parameters):
        raise SettingError(f"job {name!r}: {target} must take the Spark session as its first argument")
    return found


def parameters_of(function: Callable[..., Any]) -> str:
    """Return the parameters except the first, which is the session, as Python source."""
    hints = annotations(function)
    _, *parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(each.replace(annotation=hints.get(each.name, each.annotation))) for each in parameters)


def describe_job(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the name of a job, its parameters except the first, and its docstring."""
    about = {"parameters": parameters_of(function), "description": inspect.getdoc(function) or ""}
    return {"name": name, **{each: text[:MAX_DESCRIPTION] for each, text in about.items()}}


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations; none if they cannot be evaluated: a name may be imported for type checkers only."""
    with suppress(Exception):  # evaluating an annotation can raise anything
        return typing.get_type_hints(function, include_extras=True)
    return {}
