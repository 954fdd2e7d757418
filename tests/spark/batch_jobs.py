"""Python jobs for the tests of batches.  A task tells its process, and waits until a file is there."""

import os
import time
from pathlib import Path

from zmdp.mdp.errors import ServiceError


def rows(spark, n: int = 3):
    """A DataFrame."""
    return spark.range(n)


def value(spark, **given):
    """What it was given."""
    return {"given": given, "spark": spark.version}


def older(spark, than: int, limit: int = 10):
    """The job of docs/spark/index.md."""
    people = spark.table("people")
    yield {"people": people.count()}
    return people.where(people.age > than).orderBy("name").limit(limit)


def view(spark, name: str):
    """A table of the catalogue."""
    return spark.table(name)


def gated(spark, folder: str, tasks: int = 2):
    """As many tasks, each with a file, until the file `go` is there; the last one fails if there is `fail`."""

    def task(index, iterator):
        here = Path(folder)
        (here / f"task-{index}").write_text(str(os.getpid()))
        while not (here / "go").exists():
            time.sleep(0.01)
        if index == tasks - 1 and (here / "fail").exists():
            raise ValueError("the last task fails")
        return iterator

    return spark.sparkContext.parallelize(range(tasks), tasks).mapPartitionsWithIndex(task).count()


def many(spark, folder: str):
    """Short tasks, for minutes."""

    def task(index, iterator):
        (Path(folder) / f"task-{index}").touch()
        time.sleep(0.05)
        return iterator

    return spark.sparkContext.parallelize(range(10_000), 10_000).mapPartitionsWithIndex(task).count()


def streaming(spark, n: int = 3):
    """Says something now and then."""
    for number in range(n):
        yield {"step": number}
    return spark.range(n)


def endless(spark):
    """Says something as fast as it can."""
    while True:
        yield "x"


def stuck(spark, folder: str):
    """Python that looks at nothing but its file."""
    (Path(folder) / "began").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)


def failing(spark):
    """Raises."""
    raise ValueError("the job does not want to")


def choosing(spark):
    """Raises what the caller is to get."""
    raise ServiceError(418, "a teapot", b"detail")
