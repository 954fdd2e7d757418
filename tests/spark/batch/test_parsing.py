"""Requests to a batch, the catalogue's file, and results as JSON, without Spark."""

import json
import os
import re
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pyarrow as pa
import pytest
from support.pages import blocks

from zmdp.mdp.errors import ServiceError, SettingError
from zmdp.spark.batch import parsing
from zmdp.spark.batch.catalogue import catalogue_file, named_jobs
from zmdp.spark.batch.catalogue.offer import Offer
from zmdp.spark.batch.catalogue.roles import Role
from zmdp.spark.batch.parsing import JobCall, Query
from zmdp.spark.batch.results.sending import Results, json_rows
from zmdp.spark.command import batch


def count(spark, path: str, top: int = 10, ratio: float = 0.5, names: list[str] | None = None):
    return path, top, ratio, names


def free(spark, **anything):
    return anything


JOBS = {"count": count, "free": free}


def refused(function, *arguments):
    with pytest.raises(ServiceError) as raised:
        function(*arguments)
    assert raised.value.code == 422
    return raised.value.text


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("frames", "asked"),
    [
        ([b"SELECT 1"], Query("SELECT 1")),
        ([b"\n SELECT 1 ; "], Query("\n SELECT 1 ")),
        ([b"SELECT 1; -- that's all\n/* ; */;\n"], Query("SELECT 1")),
        ([b"SELECT '; -- a', 1"], Query("SELECT '; -- a', 1")),
        ([b"SELECT 1 -- a; -- b"], Query("SELECT 1 -- a; -- b")),
        ([b"SELECT 'it''s \\' ; ', `a;`, r'\\'; --"], Query("SELECT 'it''s \\' ; ', `a;`, r'\\'")),
        ([b"SELECT 1", b""], Query("SELECT 1")),
        ([b"SELECT 1", b"{}"], Query("SELECT 1")),
        ([b"SELECT ?", b'{"format": "arrow", "args": [1]}'], Query("SELECT ?", "arrow", [1])),
        ([b"SELECT :n", b'{"args": {"n": 1}}'], Query("SELECT :n", "json", {"n": 1})),
        ([b'{"query": "SELECT 1"}'], Query("SELECT 1")),
        (
            [b' {"query": "SELECT \\u00fc, :n;", "args": {"n": 0.10}, "format": "arrow"}'],
            Query("SELECT ü, :n", "arrow", {"n": 0.1}),
        ),
        (
            [b"SELECT :n", b'{"args": {"n": 1.10, "m": 2}, "types": {"n": "decimal(30,2)"}}'],
            Query("SELECT :n", "json", {"n": 1.1, "m": 2}, {"n": ("decimal(30,2)", "1.10")}),
        ),
        (
            [b"SELECT ?", b'{"args": [1.5, [1, null], 9223372036854775808], "types": [null, null, null]}'],
            Query(
                "SELECT ?",
                "json",
                [1.5, [1, None], 1 << 63],
                {1: ("array<bigint>", "[1, null]"), 2: ("decimal(19,0)", "9223372036854775808")},
            ),
        ),
        ([b"FROM a JOIN b using -- both\n (id)"], Query("FROM a JOIN b using -- both\n (id)")),
        (
            [b"-- why\n/* how\n*/ ((with a as (select 1) from a))"],
            Query("-- why\n/* how\n*/ ((with a as (select 1) from a))"),
        ),
    ],
)
def test_a_query(frames, asked):
    assert parsing.parse_query(frames) == asked


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "the query is empty"),
        ([b" ; "], "the query is empty"),
        ([b"SELECT 1", b"{}", b""], "one or two frames"),
        ([b"\xff"], "not valid UTF-8"),
        ([b"SET"], "not a query: 'SET'"),
        ([b"reset x"], "not a query"),
        ([b"/* SELECT */ USE x"], "not a query"),
        ([b"-- SELECT 1"], "not a query"),
        ([b"/*/" * 50_000], "not a query"),
        ([b"/**/" * 50_000], "not a query"),
        ([b"SELECTED"], "not a query"),
        ([b"SELECT 1", b"[" * 100_000], "the settings: Expected `object`, got `array`"),
        ([b"SELECT 1", b"{"], "the settings: "),
        ([b"SELECT 1", b'{"args": ["\\ud800"]}'], "the settings: "),
        ([b"SELECT ?", b'{"args": [%b]}' % (b"[" * 100_000)], "the settings: "),
        ([b"SELECT 1", b'{"colour": 1}'], "the settings: Object contains unknown field `colour`"),
        ([b"SELECT 1", b'{"format": "xml"}'], "the settings: Invalid enum value 'xml'"),
        ([b"SELECT 1", b'{"args": 1}'], "the settings: Expected `object | array | null`, got `int` - at `$.args`"),
        ([b"SELECT ?", b'{"args": [1, [2, "a"]]}'], "parameter 2[] has values of the types bigint and string"),
        ([b"SELECT ?", b'{"args": [NaN], "types": ["double"]}'], "the settings: JSON is malformed"),
        ([b"SELECT 1", b'{"types": {"x": "date"}}'], "there are types, but no args"),
        ([b"SELECT ?", b'{"args": [1], "types": {"x": "date"}}'], "types must be an object if args are one"),
        ([b"SELECT ?", b'{"args": [1], "types": [null, "date"]}'], "a list that is as long as args"),
        ([b"SELECT :x", b'{"args": {"x": 1}, "types": {"y": "date"}}'], "types has 'y', but args has not"),
        ([b"SELECT :x", b'{"args": {"x": 1}, "types": {"x": " "}}'], "the type of parameter x is ' '; expected one of"),
        ([b"SELECT :x", b'{"args": {"x": 1}, "types": {"x": "date\', 1) --"}}'], "the type of parameter x is"),
    ],
)
def test_invalid_queries(frames, message):
    assert message in refused(parsing.parse_query, frames)


@pytest.mark.parametrize(
    ("sql", "parts"),
    [
        ("SELECT 1", ("", "SELECT 1")),
        ("show\ttables", ("SHOW TABLES", "")),
        ("SHOW TABLES IN `a b`.c", ("SHOW TABLES", "`a b`.c")),
        ("DESC t", ("DESCRIBE QUERY", "TABLE t")),
        ("describe a.`b c`", ("DESCRIBE QUERY", "TABLE a.`b c`")),
        ("DESCRIBE TABLE t", ("DESCRIBE QUERY", "         TABLE t")),
        ("DESC QUERY\nVALUES (1)", ("DESCRIBE QUERY", "          \nVALUES (1)")),
        ("EXPLAIN SELECT 1", ("EXPLAIN", "        SELECT 1")),
        ("Explain cost (SELECT 1)", ("Explain cost", "             (SELECT 1)")),
    ],
)
def test_statements_about_queries(sql, parts):
    assert parsing.parse_query([sql.encode()]).parts == parts


@pytest.mark.parametrize(
    "sql",
    [
        "SHOW TABLES LIKE 'x'", "SHOW TABLES IN a b", "SHOW TABLES IN a; DROP TABLE b", "SHOW COLUMNS IN a",
        "DESCRIBE EXTENDED a", "DESCRIBE FUNCTION f", "DESCRIBE a PARTITION (b = 1)", "DESCRIBE a AS JSON",
        "EXPLAIN INSERT INTO a SELECT 1", "EXPLAIN EXTENDED DROP TABLE a", "EXPLAIN ANALYZE SELECT 1", "EXPLAIN",
        "DESCRIBE", "EXPLAINSELECT 1",
    ],
)  # fmt: skip
def test_other_statements_are_refused(sql):
    assert "not a query" in refused(parsing.parse_query, [sql.encode()])


@pytest.mark.parametrize("gap", ["", " ", "\n\t", "\u00a0", "/* */", "/* /* */ */ ", "--\n", " -- (\n"])
def test_queries_give_data_sources_no_options(gap):
    assert "options to a data source" in refused(
        parsing.parse_query, [f"SELECT * FROM t wiTH{gap}('a' = 'b')".encode()]
    )


def test_other_uses_of_with():
    for sql in ("WITH a AS (SELECT 1) SELECT * FROM a", "SELECT a FROM t GROUP BY a WITH ROLLUP", "SELECT with_x(1)"):
        assert parsing.parse_query([sql.encode()]).text == sql


def test_roles():
    role = Role("shop", ("orders", "lake.shop.*"), ("daily_*",))
    assert [role.may_read(*name) for name in (["orders"], ["lake", "shop", "a"], ["lake", "shop", "x", "a"])] == [
        True
    ] * 3
    for name in (["Orders"], ["orders2"], ["lake"], ["lake", "shop.x", "a"], ["lake", "hr", "a"], ["lake.shop.a"]):
        assert not role.may_read(*name), name
    assert (role.may_run("daily_sales"), role.may_run("execute"), role.reads_everything) == (True, False, False)
    assert "callers without a role may not read a.b: the catalogue has [roles]" in Role("").refusal("a", "b").text


def test_a_job_described():
    def job(spark, path: str, top: "int" = 10, *more, **others: float):
        """Count."""

    parameters = "path: str, top: int = 10, *more, **others: float"
    assert named_jobs.describe_job("job", job) == {"name": "job", "description": "Count.", "parameters": parameters}


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("SELECT reflect('java.lang.System', 'exit', 3)", "reflect"),
        ("SELECT `Java_Method`('a', 'b')", "Java_Method"),
        ("SELECT IDENTIFIER('ref' || 'lect')('a', 'b')", "IDENTIFIER"),
        ("SELECT TRANSFORM(a) USING 'id' AS (x) FROM t", "USING"),
        ("SELECT TRANSFORM(a) USING /* /* */ ( */ 'id' AS (x) FROM t", "USING"),
        ("SELECT TRANSFORM(a) USING --\r'id' AS\n(x) FROM t", "USING"),
        ("SELECT 1 FROM a JOIN b USING\n(id)", None),
        ("SELECT musing, reflection FROM a", None),
    ],
)
def test_unsafe_words_in_queries(sql, word):
    assert parsing.unsafe_word(sql) == word


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("frames", "arguments", "format_"),
    [
        ([b"count", b'{"path": "a"}'], {"path": "a"}, "json"),
        ([b"count", b'{"path": "a", "top": 3, "ratio": 1, "names": null}', b'{"format": "arrow"}'],
         {"path": "a", "top": 3, "ratio": 1, "names": None}, "arrow"),
        ([b"count", b'{"path": "a", "names": ["b"]}'], {"path": "a", "names": ["b"]}, "json"),
        ([b"free", b'{"x": {"y": [1]}}'], {"x": {"y": [1]}}, "json"),
        ([b"free"], {}, "json"),
    ],
)  # fmt: skip
def test_a_call(frames, arguments, format_):
    name = frames[0].decode()
    assert parsing.parse_call(frames, JOBS) == JobCall(name, JOBS[name], arguments, format_)


def test_a_call_as_one_object():
    body = b'{"job": "free", "arguments": {"x": 1}, "format": "arrow"}'
    assert parsing.parse_call([body], JOBS) == JobCall("free", free, {"x": 1}, "arrow")
    assert parsing.parse_call([b'{"job": "free"}'], JOBS) == JobCall("free", free)


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"query": 1}', b'{"query": "\\ud800"}', b"{" * 100_000, b'{"\xff": 1}']
)
def test_an_object_that_is_no_request(body):
    assert 'a JSON object, {"query": "…", …}: ' in refused(parsing.parse_query, [body])


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"nope"], "no job named 'nope'; available jobs: count, free"),
        ([b"count"], "missing a required argument: 'path'; its parameters are (path: str, top: int = 10"),
        (
            [b"count", b'{"path": "a", "colour": 1}'],
            "got an unexpected keyword argument 'colour'; its parameters are (path: str",
        ),
        ([b"count", b'{"path": 1}'], "path is 1; expected str ($: expected str, got int)"),
        ([b"count", b'{"path": "a", "top": 1.5}'], "top is 1.5; expected int ("),
        ([b"count", b'{"path": "a", "top": true}'], "top is True; expected int ("),
        ([b"count", b'{"path": "a", "ratio": "x"}'], "ratio is 'x'; expected float ("),
        ([b"count", b'{"path": "a", "names": [1]}'], "expected list[str] | None"),
        ([b"count", b"3"], "the arguments: Expected `object`, got `int`"),
        ([b"count", b'{"path": "a"}', b'{"args": {}}'], "the settings: Object contains unknown field `args`"),
        ([b"count", b"", b"", b""], "one to three frames"),
    ],
)
def test_invalid_calls(frames, message):
    assert message in refused(parsing.parse_call, frames, JOBS)


def test_a_call_without_any_jobs():
    assert refused(parsing.parse_call, [b"x"], {}) == "no job named 'x'; available jobs: none"


class Colour(Enum):
    RED = "red"


class Unknown:
    """A class to which JSON cannot be converted."""


IDENTITY = UUID("0123456789abcdef0123456789abcdef")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int | str, 1), ("a", int | str, "a"), ("a", Literal["a", "b"], "a"), (1, Annotated[int, "n"], 1),
        ({"a": 1}, dict[str, int], {"a": 1}), (None, None, None), (1, Any, 1), (True, bool, True), (1, float, 1.0),
        ("2026-01-31", date, date(2026, 1, 31)),
        ("2026-01-31T12:00:00Z", datetime, datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("1.50", Decimal, Decimal("1.50")), (IDENTITY.hex, UUID, IDENTITY), ("red", Colour, Colour.RED),
        (["2026-01-31", None], list[date | None], [date(2026, 1, 31), None]), ("x", Unknown, "x"),
    ],
)  # fmt: skip
def test_arguments_get_the_types_of_the_annotations(value, hint, expected):
    def job(spark, x):
        return x

    job.__annotations__["x"] = hint
    assert parsing.convert_arguments("job", job, [json.dumps({"x": value}).encode()]) == {"x": expected}


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (1.5, int | str, "expected int | str ($: expected int | str, got float)"), ("c", Literal["a", "b"], "expected"),
        ("1", Annotated[int, "n"], "got str"), ({"a": "b"}, dict[str, int], "$[...]: expected int, got str"),
        ([], dict, "expected dict ("), (1, None, "got int"), (True, float, "expected float ("),
        (1, date, "x is 1; expected datetime.date ($: expected date, got int)"),
        ("31.1.", date, "invalid RFC3339 encoded date"),
        ("x", Decimal, "expected decimal.Decimal"), ("x", UUID, "expected uuid.UUID"),
        ("blue", Colour, "invalid enum value"),
    ],
)  # fmt: skip
def test_arguments_of_other_types(value, hint, message):
    def job(spark, x):
        return x

    job.__annotations__["x"] = hint
    assert message in refused(parsing.convert_arguments, "job", job, [json.dumps({"x": value}).encode()])


def test_numbers_keep_their_digits():
    def job(spark, exact: Decimal, prices: list[Decimal], number: float, plain=None):
        return exact

    text = b'{"exact": 12345678901234567890.13, "prices": [0.10], "number": 0.10, "plain": 0.10}'
    assert parsing.convert_arguments("job", job, [text]) == {
        "exact": Decimal("12345678901234567890.13"), "prices": [Decimal("0.10")], "number": 0.1, "plain": 0.1
    }  # fmt: skip


def test_unresolvable_annotations_are_checked_by_name_only():
    def job(spark, path: "OnlyForTypeCheckers"):  # noqa: F821
        return path

    assert parsing.convert_arguments("job", job, [b'{"path": 1}']) == {"path": 1}
    assert "unexpected keyword argument 'way'" in refused(
        parsing.convert_arguments, "job", job, [b'{"path": 1, "way": 1}']
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nonsense", "MODULE:FUNCTION, for example yourpackage.jobs:wordcount"),
        ("no.such.module:f", "No module named 'no'"),
        ("json:nothing", "has no 'nothing'"),
        ("json:__name__", "is a str, not a function"),
        ("os:getcwd", "must take the Spark session as its first argument"),
    ],
)
def test_invalid_jobs(target, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        named_jobs.load_jobs({"x": target})


# ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("SALES_PASSWORD", "secret")
    path = tmp_path / "catalogue.toml"
    path.write_text("""
        results = "results"
        [tables.orders]
        format = "parquet"
        path = "orders"
        [tables.far]
        format = "csv"
        path = "s3a://bucket/far"
        schema = "a int"
        options = { header = true, sep = ";", samplingRatio = 0.5 }
        [tables.sales]
        format = "jdbc"
        options = { url = "jdbc:postgresql://db/sales", password = { env = "SALES_PASSWORD" } }
        [jobs]
        count = "a.b:c"
    """)
    found = catalogue_file.read(path)
    assert found.results == str(tmp_path / "results")
    assert found.jobs == {"count": "a.b:c"}
    assert found.tables == {
        "orders": catalogue_file.Table("orders", "parquet", str(tmp_path / "orders")),
        "far": catalogue_file.Table(
            "far", "csv", "s3a://bucket/far", "a int", {"header": "true", "sep": ";", "samplingRatio": "0.5"}
        ),
        "sales": catalogue_file.Table(
            "sales", "jdbc", None, None, {"url": "jdbc:postgresql://db/sales", "password": "secret"}
        ),
    }
    assert [table.name for table in found.named_in("select * from `Orders` o join x.sales")] == ["orders", "sales"]
    assert found.named_in("select orders2, farther from fa") == []


def test_the_digest_of_what_a_batch_offers(tmp_path, monkeypatch):
    def digest(text, jobs=JOBS, secret="a"):
        monkeypatch.setenv("SECRET", secret)
        (tmp_path / "catalogue.toml").write_text(text)
        return Offer(catalogue_file.read(tmp_path / "catalogue.toml"), jobs).digest

    one, other = '[tables.a]\nformat = "csv"\npath = "a"\n', '[tables.b]\nformat = "csv"\n'
    assert digest(one + other) == digest(f"results = 'x'\n{other}{one}# nothing else")
    secret = one + 'options = { password = { env = "SECRET" } }'
    assert digest(secret) == digest(secret, secret="b")
    found = [
        digest(text, jobs)
        for text in (
            one,
            other,
            one + other,
            secret,
            one.replace('"a"', '"b"'),
            one + "[catalogs.c]",
            one + "[roles.r]",
        )
        for jobs in (JOBS, {"count": count}, {"count": free})
    ]
    assert len(set(found)) == len(found)


def test_roles_on_connect_read_everything_or_nothing(tmp_path):
    path = tmp_path / "catalogue.toml"
    for tables in ('["*"]', '["a", "*"]', "[]"):
        path.write_text(f"[roles.shop]\ntables = {tables}")
        assert catalogue_file.read(path, remote=True).roles["shop"].name == "shop"
    path.write_text('[roles.shop]\ntables = ["people"]')
    with pytest.raises(
        SettingError, match="role shop: the batch cannot see which tables a query reads on a Spark Conn"
    ):
        catalogue_file.read(path, remote=True)


def test_the_catalogs_of_the_page_about_batches(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "spark" / "index.md").read_text()
    _, text, *_, roles = blocks(page, "toml")
    monkeypatch.setenv("CATALOG_TOKEN", "secret")
    (tmp_path / "catalogue.toml").write_text(f"{text}\n{roles}\n[catalogs.allowed]\n")
    found = catalogue_file.read(tmp_path / "catalogue.toml")
    assert found.catalogs["lake"] == {
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "rest",
        "spark.sql.catalog.lake.uri": "http://catalog:8181",
        "spark.sql.catalog.lake.token": "secret",
    }
    assert found.settings["spark.sql.catalog.spark_catalog"] == "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    assert found.roles["analyst"] == Role("analyst", ("people", "lake.shop.*"), ("older",))
    assert found.catalogs["allowed"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tables = [", "is not valid TOML"),
        ("catalogs = 3", "catalogue.toml: Expected `object`, got `int` - at `$.catalogs`"),
        ("[catalogs.'a.b']", "'a.b': the name of a table or catalog has only letters"),
        ("[catalogs]\na = 3", "catalog a: Expected `object`, got `int`"),
        ("[catalogs.a]\nclass = 3", "catalog a: Expected `str | null`, got `int` - at `$.class`"),
        ("[catalogs.a]\nurl = 'b'", "catalog a: Object contains unknown field `url` ('url': known are class, options)"),
        ("[catalogs.a]\noptions = { b = 1 }", "catalog a: options need class"),
        ("colour = 1", "unknown field `colour` ('colour': known are tables, jobs, results, catalogs, roles)"),
        ("[roles.a]\ntables = 'b'", "role a: Expected `array`, got `str` - at `$.tables`"),
        ("[jobs]\na = 3", "catalogue.toml: Expected `str`, got `int` - at `$.jobs[...]`"),
        ("[tables.a]\npath = 'b'", "table a: Object missing required field `format`"),
        ("[tables.'a b']\nformat = 'csv'", "'a b': the name of a table or catalog has only letters"),
        ("[tables.a]\nformat = 'csv'\noptions = { b = [] }", "table a: Expected `"),
        (
            "[tables.a]\nformat = 'csv'\noptions = { b = { env = 'ZMDP_NOT_SET' } }",
            "set the environment variable ZMDP_NOT_SET",
        ),
    ],
)
def test_invalid_catalogues(tmp_path, text, message):
    path = tmp_path / "catalogue.toml"
    path.write_text(text)
    with pytest.raises(SettingError) as raised:
        catalogue_file.read(path)
    assert message in str(raised.value)


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_as_json():
    table = pa.table(
        {
            "n": pa.array([1, None]),
            "f": pa.array([1.5, float("nan")]),
            "s": pa.array(["ä\n", ""]),
            "b": pa.array([b"\x00\xff", None]),
            "d": pa.array([date(2026, 1, 2), None]),
            "t": pa.array([datetime(2026, 1, 2, 3, 4, 5, 6, UTC), None]),
            "h": pa.array([time(1, 2, 3), None]),
            "c": pa.array([Decimal("1.10"), None]),
            "l": pa.array([[1, 2], None]),
            "o": pa.array([{"x": Decimal(3)}, None]),
            "m": pa.array([[(1, "y")], None], pa.map_(pa.int64(), pa.string())),
            "z": pa.array([True, None]),
        }
    )
    assert json.loads(json_rows(table)) == [
        {"n": 1, "f": 1.5, "s": "ä\n", "b": "AP8=", "d": "2026-01-02", "t": "2026-01-02T03:04:05.000006Z",
         "h": "01:02:03", "c": "1.10", "l": [1, 2], "o": {"x": "3"}, "m": {"1": "y"}, "z": True},
        {"n": None, "f": "nan", "s": "", "b": None, "d": None, "t": None, "h": None, "c": None, "l": None, "o": None,
         "m": None, "z": None},
    ]  # fmt: skip


def test_values(tmp_path):
    results = Results(str(tmp_path), inline=100)
    described, data = results.frames({"a": [1, date(2026, 1, 2)]}, "0" * 16, "json")
    assert json.loads(described) == {"job": "0" * 16, "format": "value", "path": None}
    assert data == b'{"a": [1, "2026-01-02"]}'
    described, data = results.frames("x" * 200, "1" * 16, "json")
    path = tmp_path / f"{'1' * 16}.json"
    assert (json.loads(described)["path"], data) == (str(path), b"")
    assert json.loads(path.read_text()) == "x" * 200


def test_values_that_json_cannot_represent_or_are_too_large(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(SettingError, match="the job's result is nested too deeply"):
        Results(str(tmp_path)).frames(loop, "0" * 16, "json")
    with pytest.raises(ServiceError, match="the result has 202 bytes or more; at most 100 bytes can be sent") as raised:
        Results(None, inline=100).frames("x" * 200, "0" * 16, "json")
    assert raised.value.code == 413
    with pytest.raises(ServiceError, match="Return a DataFrame instead, which is written to hdfs://x"):
        Results("hdfs://x/", inline=100).frames("x" * 200, "0" * 16, "json")


def test_only_old_results_are_deleted(tmp_path):
    old, new, others = "0" * 16, "1" * 16, "somebody-elses"
    for name in (old, new):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.parquet").touch()
    (tmp_path / f"{old}.json").touch()
    (tmp_path / others).touch()
    for name in (old, f"{old}.json", others):
        os.utime(tmp_path / name, (1, 1))
    for folder in (str(tmp_path), None, "s3a://bucket", str(tmp_path / "none")):
        Results(folder).delete_old(3600)
    assert sorted(each.name for each in tmp_path.iterdir()) == [new, others]


@pytest.mark.parametrize(
    ("given", "master", "folder"),
    [
        ("/a", "yarn", "/a"), ("a", "yarn", str(Path("a").absolute())), ("file:///a", "yarn", "/a"),
        ("file:/a", "yarn", "/a"), ("file://localhost/a", "yarn", "/a"), ("file://b/a", "yarn", "file://b/a"),
        ("s3a://b/c", "yarn", "s3a://b/c"), (None, "yarn", None),
        (None, "local[2]", str(Path("spark-results").absolute())),
    ],
)  # fmt: skip
def test_the_folder_for_results(given, master, folder):
    assert batch._results_folder(given, master, None) == folder
