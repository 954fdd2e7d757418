"""Spark reads Titanic's requests as a stream, also after it died; tests/titanic/db/test_offsets.py has the rules."""

import pytest
from support.sparks import finish, forget_last_batch

pytestmark = pytest.mark.long


@pytest.fixture
def run(spark, db, tmp_path):
    """`run(**options)`: run the available micro-batches from the checkpoint; return the ids of each batch."""

    def running(checkpoint="checkpoint", **options):
        batches = {}

        def keep(frame, number):
            batches[number] = sorted(row.id for row in frame.collect())

        finish(
            spark.readStream.format("titanic").schema("id long, reply string").option("db", db.url).options(**options)
            .load().writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
        )  # fmt: skip
        return batches

    return running


def test_a_restarted_stream_continues_and_repeats_its_last_batch(db, run, tmp_path):
    for _ in range(5):
        db.done()
    db.add()
    batches = run(maxRowsPerTrigger="2")
    assert [id_ for number in sorted(batches) for id_ in batches[number]] == [1, 2, 3, 4, 5]
    db.end()
    later = run()
    assert list(later.values()) == [[6]]
    (number,) = later
    forget_last_batch(tmp_path / "checkpoint")
    db.done()
    again = run()
    assert again[number] == [6]
    again |= run()  # PySpark before 4.2 ends after the batch that it had begun
    assert [id_ for each in sorted(again) for id_ in again[each]] == [6, 7]
