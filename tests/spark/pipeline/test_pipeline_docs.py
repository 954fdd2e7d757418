"""docs/spark/pipeline.md is correct: its Python runs and prints what it shows, and its table lists all parameters."""

import inspect
import re
from pathlib import Path

import pytest
from support.pages import blocks
from support.sparks import BEATS
from support.titanics import serving

from zmdp.spark.pipeline import call_service
from zmdp.workers import Worker

PAGE = Path(__file__).parents[3] / "docs" / "spark" / "pipeline.md"
TEXT = PAGE.read_text().partition("\n## In streams\n")[0]
"""What comes after is tested by test_streams.py."""


@pytest.mark.long
def test_its_python_runs(spark, endpoint, tmp_path, capsys):
    names = {}
    shout = Worker("shout", lambda request: [frame.upper() for frame in request], broker=endpoint, **BEATS)
    rate = Worker(
        "rate", lambda job: {"good": "good" in job["text"], "words": []}, codec="json", broker=endpoint, **BEATS
    )
    with shout, rate, serving(endpoint, str(tmp_path / "titanic.db"), **BEATS):
        for block in blocks(TEXT, "python"):
            here = block.replace("tcp://127.0.0.1:5555", endpoint).replace('t("replies")', f't("{tmp_path}/replies")')
            exec(compile(here, str(PAGE), "exec"), names)
        assert names["typed"].count() == 3
        codes = [(row.id, row.reply_code) for row in names["rated"].orderBy("id").collect()]
        assert codes == [(1, 200), (2, 500), (3, 200)]  # a plain worker does not check what it gets
        assert names["rated"].schema["reply"].dataType.simpleString() == "struct<good:boolean,words:array<string>>"
    shown = re.findall(r"^    ([+|].*)$", TEXT, re.MULTILINE)
    assert capsys.readouterr().out.split("\n")[: len(shown)] == shown
    assert names["spark"] is spark


def test_every_parameter_is_described():
    described = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    described.remove("_code")
    assert sorted(described) == sorted(inspect.signature(call_service).parameters.keys() - {"df", "service"})
