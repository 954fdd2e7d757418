"""Spark's errors on one line."""

import pytest

from zmdp.spark.reasons import reason

ANALYSIS = """[TABLE_OR_VIEW_NOT_FOUND] The table or view `nope` cannot be found.
If you did not qualify the name, verify it. SQLSTATE: 42P01; line 1 pos 14;
'Project [*]
+- 'UnresolvedRelation [nope], [], false
"""
PARSE = """
[PARSE_SYNTAX_ERROR] Syntax error at or near '1': extra input '1'. SQLSTATE: 42601 (line 1, pos 6)

== SQL ==
SELEC 1
------^^^

JVM stacktrace:
org.apache.spark.sql.catalyst.parser.ParseException
"""
PYTHON = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "a.py", line 1, in f
    first()
ValueError: the first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    raise ValueError("it")
    ^^^^^^^^^^^^^^^
ValueError: it went
wrong

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""


READ = """An error occurred while calling o97.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.X.y(X.scala:1)
Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file:///c.csv. \
SQLSTATE: KD001
\tat org.apache.spark.X.y(X.scala:1)
\t... 45 more
Caused by: org.apache.spark.SparkRuntimeException: [MALFORMED_RECORD_IN_PARSING] Malformed records.
Try setting the option 'mode' as 'PERMISSIVE'. SQLSTATE: 22023
\tat org.apache.spark.X.y(X.scala:1)
Caused by: java.lang.NumberFormatException: For input string: "x"
\tat java.base/java.lang.X.y(X.java:1)
"""
MISSING_DRIVER = """An error occurred while calling o295.load.
: java.lang.ClassNotFoundException: org.postgresql.Driver
\tat java.base/java.net.X.y(X.java:1)
"""
CRASHED = """Job aborted due to stage failure: Lost task 0.0: java.io.IOException: it crashed

Driver stacktrace:
\tat org.apache.spark.X.y(X.scala:1)
Caused by: java.io.IOException: it crashed
\tat java.base/java.lang.X.y(X.java:1)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ANALYSIS, "[TABLE_OR_VIEW_NOT_FOUND] The table or view `nope` cannot be found. "
         "If you did not qualify the name, verify it. SQLSTATE: 42P01; line 1 pos 14"),
        (PARSE, "[PARSE_SYNTAX_ERROR] Syntax error at or near '1': extra input '1'. SQLSTATE: 42601 (line 1, pos 6)"),
        (PYTHON, "ValueError: it went wrong"),
        (READ, "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file:///c.csv. SQLSTATE: KD001; caused by "
         "[MALFORMED_RECORD_IN_PARSING] Malformed records. Try setting the option 'mode' as 'PERMISSIVE'. SQLSTATE: "
         '22023; caused by NumberFormatException: For input string: "x"'),
        (MISSING_DRIVER, "ClassNotFoundException: org.postgresql.Driver"),
        (CRASHED, "Job aborted due to stage failure: Lost task 0.0: java.io.IOException: it crashed"),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: iceberg. SQLSTATE: 42K02", "[DATA_SOURCE_NOT_FOUND] "
         "Failed to find the data source: iceberg. SQLSTATE: 42K02; if it comes in a jar, add --conf "
         "spark.jars.packages=GROUP:ARTIFACT:VERSION or spark.jars=FILE"),
        ("ModuleNotFoundError: No module named 'x'", "ModuleNotFoundError: No module named 'x'; executors need it: "
         "start the batch with --py-files FILE, a .py file or a zip that has it"),
        ("plain", "plain"),
        ("", "RuntimeError"),
        ("x" * 2000, "x" * 1000),
    ],
)  # fmt: skip
def test_errors_on_one_line(text, message):
    assert reason(RuntimeError(text)) == message
