"""Care for the Python processes in which Spark runs our code, and that of others."""

import gc
from functools import cache


@cache
def exempt_imports_from_collection() -> None:
    """Let the garbage collector pass over everything that exists now; once in a process, after the imports.

    PySpark collects garbage after every task and after every step of planning.  With our imports, more than a hundred
    thousand objects that live as long as the process, that takes longer than a short task.
    """
    gc.freeze()
