"""Streams through services, as docs/spark/pipeline.md has them: each row once, also when a micro-batch is repeated."""

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.databases import Database
from support.pages import blocks
from support.processes import eventually
from support.sparks import BEATS, forget_last_batch
from support.titanics import serving

from zmdp.spark.pipeline import call_service
from zmdp.workers import Worker

PAGE = Path(__file__).parents[3] / "docs" / "spark" / "pipeline.md"
SECTION = PAGE.read_text().partition("\n## In streams\n")[2]


@pytest.mark.long
def test_a_repeated_batch_calls_and_submits_nothing_again(spark, endpoint, tmp_path):
    called = Counter()

    def handler(name):
        def handle(request):
            called[name, request[0]] += 1
            return request[0].upper()

        return handle

    (tmp_path / "orders").mkdir()

    def add(*orders):
        path = tmp_path / "orders" / f"{orders[0][0]}.json"
        path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in orders))

    names = {"spark": spark}

    def run():
        """Run what is there, as the page says."""
        for block in blocks(SECTION, "python"):
            here = block.replace("tcp://127.0.0.1:5555", endpoint)
            for name in ("replies/", 'orders")', "checkpoints/", "titanic.db"):
                here = here.replace(name, f"{tmp_path}/{name}")
            exec(compile(here, str(PAGE), "exec"), names)
        rows = spark.read.parquet(str(tmp_path / "replies")).orderBy("id").collect()
        return [(row.batch, row.id, row.reply) for row in rows]

    with ExitStack() as stack:
        db = str(tmp_path / "titanic.db")
        stack.enter_context(serving(endpoint, db, **BEATS))
        for name in ("score", "invoice", "alert"):
            stack.enter_context(Worker(name, handler(name), broker=endpoint, **BEATS))
        add((1, "tea"), (2, "urgent tea"))
        first = run()
        assert first == [(0, 1, "TEA"), (0, 2, "URGENT TEA")]
        for checkpoint in ("score", "submit"):
            forget_last_batch(tmp_path / "checkpoints" / checkpoint)
        assert run() == first
        add((3, "milk"))
        eventually(lambda: len(run()) == 3)  # PySpark before 4.2 ends after the batch that it repeats
        wanted = Counter({("score", b"tea"): 1, ("score", b"urgent tea"): 1, ("score", b"milk"): 1})
        wanted |= {("invoice", text): 1 for _, text in wanted} | {("alert", b"urgent tea"): 1}
        eventually(lambda: len(called) == len(wanted))
        assert called == wanted
        direct = call_service(names["orders"], "score", input="text", broker=endpoint)
        writer = direct.writeStream.format("parquet").option("checkpointLocation", f"{tmp_path}/checkpoints/direct")
        writer.trigger(availableNow=True).start(f"{tmp_path}/direct").awaitTermination()
        assert spark.read.parquet(f"{tmp_path}/direct").where("reply_code = 200").count() == 3
        database = Database(db)
        try:
            assert Counter(row.service for row in database.requests()) == {"score": 3, "invoice": 3, "alert": 1}
        finally:
            database.engine.dispose()
