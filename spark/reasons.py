"""Spark's errors on one line, as callers and logs get them."""

import re
from collections.abc import Iterator
from itertools import dropwhile
from typing import Final

MAX_CHARACTERS: Final = 1000
_PY4J: Final = re.compile(r"\AAn error occurred while calling .*\n: ")
_CAUSE: Final = re.compile(r"^Caused by: ", re.MULTILINE)
_JAVA_CLASS: Final = re.compile(
    # Removed before a condition and if it is Spark's general one; of others, only the package is.
    r"^(?:[a-z]\w*\.)+(?:SparkException: |[A-Z][\w$]*: (?=\[[A-Z])|(?=[A-Z][\w$]*(?:: |$)))"
)
_STACK: Final = re.compile(r"\s*(== SQL|(JVM|Driver) stacktrace|at [\w.$]+[(/]|'?\w+ \[|\+- )")
_PLAN_FOLLOWS: Final = re.compile(r"pos \d+;$")
_PYTHON: Final = "Traceback (most recent call last):\n"
_WRAPPER: Final = "Exception thrown in awaitResult"
"""Spark's wrapper of an error in another thread."""
_CONDITION: Final = re.compile(r"\[[A-Z][A-Z0-9_.]+\] ")
_NEEDS_JAR: Final = re.compile(r"\[(DATA_SOURCE_NOT_FOUND|CANNOT_LOAD_CATALOG\.PLUGIN_CLASS_NOT_FOUND)\]")
_NEEDS_FILE: Final = re.compile(r"ModuleNotFoundError: No module named ('[^']+')")
_ADD_FILE: Final = "; executors need it: start the batch with --py-files FILE, a .py file or a zip that has it"
_ADD_JAR: Final = "; if it comes in a jar, add --conf spark.jars.packages=GROUP:ARTIFACT:VERSION or spark.jars=FILE"


def reason(error: BaseException) -> str:
    """Return Spark's error on one line: the outermost one that has a condition, and the causes below it.

    Without any condition, the line begins with the outermost error.  Of an error in a task's Python code, it has the
    Python exception.
    """
    found = [each for each in map(_on_one_line, _CAUSE.split(_text(error))) if each]
    informative = [each for each in found if not each.startswith(_WRAPPER)] or found
    first = next((at for at, each in enumerate(informative) if _CONDITION.match(each)), 0)
    text = "; caused by ".join(_distinct(informative[first:]))
    remedy = _ADD_JAR if _NEEDS_JAR.match(text) else _ADD_FILE if _NEEDS_FILE.search(text) else ""
    return text[: MAX_CHARACTERS - len(remedy)] + remedy or type(error).__name__


def _text(error: BaseException) -> str:
    """Return an error's text, with the causes that Java gives in its stack trace."""
    text = _PY4J.sub("", str(error))
    _, *causes = _CAUSE.split(getattr(error, "_stackTrace", None) or "")  # PySpark's own errors leave them out
    return "\nCaused by: ".join([text, *causes])


def _on_one_line(text: str) -> str:
    """Return the message of one error, without stack trace and plan."""
    _, python, after = text.rpartition(_PYTHON)
    if python:  # the traceback of a task: its indented lines come first, then the exception
        text = "\n".join(dropwhile(lambda line: line.startswith(" "), after.splitlines()))
        text = re.sub(r"^ SQLSTATE: \w+$", "", text, flags=re.MULTILINE)
    kept = []
    for line in text.splitlines():
        if _STACK.match(line):
            break
        kept.append(line.strip())
        if _PLAN_FOLLOWS.search(line):
            break
    return _JAVA_CLASS.sub("", " ".join(line for line in kept if line), count=1).rstrip("; ")


def _distinct(errors: list[str]) -> Iterator[str]:
    """Yield the errors, except those whose message an earlier one has."""
    said = ""
    for each in errors:
        message = each.partition(": ")[2] if re.match(r"[\w$]+: ", each) else each
        if message not in said:
            yield each
        said += f"{each}\n"
