"""A data pipeline: send text in Parquet through a service, and write typed columns and totals as Parquet.

    python examples/pipeline.py [--rows N] [--durable] [--out FOLDER]

The corpus is something that every Python installation has: the docstrings of the standard library, one row per module,
class and function.  The service `text.words` counts words; this program starts two worker processes for it (`mdworker
pipeline:words`).  With --durable, each row goes through Titanic with a key, so that it is executed once however often
Spark runs the plan; the program then starts Titanic as well.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zmdp.clients import Client
from zmdp.workers import Request, Worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
START_SECONDS = 90.0
END_SECONDS = 35.0
"""Seconds that a process may take to end: --drain-timeout is at most 30."""
WORD = re.compile(r"[a-z]+")
REPLY = "words int, distinct_words int, longest string, most_frequent string"
"""The schema of a reply, for Spark."""

words = Worker("text.words")


@words
def count_words(request: Request) -> list[bytes]:
    """Return statistics as JSON for each text, one frame per text, so that requests can carry many texts."""
    return [json.dumps(figures(frame.decode())).encode() for frame in request]


def figures(text: str) -> dict[str, object]:
    """Return the number of words and of distinct words, the longest, and the most frequent with 4 or more letters."""
    found = WORD.findall(text.lower())
    counts = Counter(found)
    long_ones = Counter(word for word in found if len(word) >= 4)
    return {
        "words": len(found),
        "distinct_words": len(counts),
        "longest": max(counts, key=lambda word: (len(word), word), default=None),
        "most_frequent": max(long_ones, key=lambda word: (long_ones[word], word), default=None),
    }


# ── the corpus ───────────────────────────────────────────────────────────────────────────────────────────────────────


def documents() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and docstring of everything in the standard library that has a docstring."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = ".".join(path.relative_to(library).with_suffix("").parts)
        if {"site-packages", "dist-packages", "test", "tests"} & set(module.split(".")):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # some test files are invalid on purpose
            continue
        for number, node in enumerate(ast.walk(tree)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield module.split(".")[0], f"{module}:{getattr(node, 'name', '')}:{number}", text


def write_corpus(spark: "SparkSession", rows: int, folder: str) -> int:
    """Write up to `rows` documents as Parquet.  Return how many there were."""
    found = [document for document, _ in zip(documents(), range(rows), strict=False)]
    df = spark.createDataFrame(found, "module string, name string, text string")
    df.write.parquet(folder)
    return len(found)


# ── processes beside Spark ───────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of zmdp's commands while the block lasts."""
    running = subprocess.Popen(
        [str(BIN / command[0]), *command[1:], "--log-level", "error"], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            print(f"pipeline: killed {command[0]}: it did not end within {END_SECONDS:g} s", file=sys.stderr)
        if running.stdout:
            running.stdout.close()


def start(stack: ExitStack, folder: Path, *, durable: bool) -> str:
    """Start a broker, two workers and, if `durable`, Titanic.  Return the broker's endpoint."""
    broker = stack.enter_context(process("mdp-broker", "--bind", "tcp://127.0.0.1:*"))
    endpoint = broker.stdout.readline().strip() if broker.stdout else ""
    if not endpoint:
        raise SystemExit("pipeline: the broker did not start; see its message above")
    for _ in range(2):
        stack.enter_context(process("mdworker", "pipeline:words", "--broker", endpoint))
    needed = ["text.words"]
    if durable:
        stack.enter_context(process("titanic", "serve", "--db", str(folder / "titanic.db"), "--broker", endpoint))
        needed.append("titanic.request")
    until = time.monotonic() + START_SECONDS
    with Client(endpoint) as client:
        while not all(client.available(service) for service in needed):
            if time.monotonic() > until:
                raise SystemExit(f"pipeline: gave up after waiting {START_SECONDS:g} s for {' and '.join(needed)}")
            time.sleep(0.05)
    return endpoint


# ── the pipeline ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run(spark: "SparkSession", endpoint: str, folder: Path, *, durable: bool) -> None:
    """Call the service for the corpus and print the totals."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - the customary name

    from zmdp.spark.pipeline import call_service  # noqa: PLC0415

    corpus = spark.read.parquet(str(folder / "corpus"))
    if durable:
        # The same key is the same request for a day, so keys get a prefix that is unique to this run.
        keyed = corpus.withColumn("key", F.concat(F.lit(f"pipeline-{time.time():.0f}/"), "name"))
        replies = call_service(keyed, "text.words", input="text", key="key", window=256, broker=endpoint)
    else:
        replies = call_service(corpus, "text.words", input="text", broker=endpoint)

    # Write the replies before using them: the steps below read the files and make no calls.
    typed = replies.withColumn("found", F.from_json("reply", REPLY)).drop("reply", "text")
    began = time.monotonic()
    typed.select("*", "found.*").drop("found").write.parquet(str(folder / "words"))
    seconds = time.monotonic() - began

    done = spark.read.parquet(str(folder / "words"))
    totals = done.where("reply_code = 200").groupBy("module").agg(
        F.count("*").alias("documents"),
        F.sum("words").alias("words"),
        F.round(F.avg("words"), 1).alias("words_each"),
        F.max(F.struct(F.length("longest"), "longest")).getField("longest").alias("longest"),
    )  # fmt: skip
    totals.coalesce(1).write.parquet(str(folder / "modules"))

    rows, failed = done.count(), done.where("reply_code <> 200").count()
    how = "one request per row, through Titanic" if durable else "50 rows per request"
    print(
        f"called text.words for {rows:,} rows in {seconds:.1f} s ({how}): {rows / seconds:,.0f} rows/s; {failed} failed"
    )
    for row in done.where("reply_code <> 200").limit(3).collect():
        print(f"  {row.name}: {row.reply_code} {row.reply_error}")
    print("the modules with the most words:")
    for row in spark.read.parquet(str(folder / "modules")).orderBy(F.desc("words")).limit(5).collect():
        print(f"  {row.module:<16}{row.documents:>6,} documents{row.words:>9,} words   longest: {row.longest}")


def main() -> None:
    """Run the pipeline and everything it needs."""
    parser = argparse.ArgumentParser(description="Send a text corpus through a service, on Spark.")
    parser.add_argument("--rows", type=int, default=10_000, metavar="N", help="maximum number of documents  [10000]")
    parser.add_argument(
        "--durable", action="store_true", help="send each row through Titanic with a key, so that it is executed once"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to create for the output  [a temporary one]")
    given = parser.parse_args()

    from zmdp.spark.session import SparkError, open_session  # noqa: PLC0415 - workers import this module and need no Spark

    folder = (given.out or Path(tempfile.mkdtemp()) / "pipeline").absolute()
    folder.mkdir(parents=True)
    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    try:
        spark = open_session("pipeline", conf=conf)
    except SparkError as error:
        raise SystemExit(f"pipeline: {error}") from None
    with ExitStack() as stack:
        stack.callback(spark.stop)
        rows = write_corpus(spark, given.rows, str(folder / "corpus"))
        print(f"the corpus: {rows:,} documents of the standard library, as Parquet")
        run(spark, start(stack, folder, durable=given.durable), folder, durable=given.durable)
    print(f"the output: {folder}/words and {folder}/modules")


if __name__ == "__main__":
    main()
