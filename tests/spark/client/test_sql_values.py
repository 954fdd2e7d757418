"""The types in Spark of Python's values, and what is refused, without Spark."""

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.spark.client.sql_values import plain, sql_scalar, sql_type


@dataclass
class Point:
    x: Decimal
    y: int | None = None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([], "array<void>"), ([None], "array<void>"), ([[], [1]], "array<array<bigint>>"), ((True,), "array<boolean>"),
        ([Decimal("1E+3"), Decimal("0.001"), None], "array<decimal(7,3)>"), (Decimal("0.00"), "decimal(2,2)"),
        ([1, Decimal("2.5")], "array<decimal(2,1)>"), ([1, 1 << 63], "array<decimal(19,0)>"), (0, "bigint"),
        (Decimal("-99999999999999999999999999999999999999"), "decimal(38,0)"), (Decimal(0), "decimal(1,0)"),
        ({"a `b`": None, "c": {"d": 1.5}}, "struct<`a ``b```: void, `c`: struct<`d`: double>>"),
        ([Point(Decimal("1.5")), Point(Decimal(10), 2)], "array<struct<`x`: decimal(3,1), `y`: bigint>>"),
        ([{"a": 1}, {"b": date(2026, 1, 2)}], "array<struct<`a`: bigint, `b`: date>>"),
    ],
)  # fmt: skip
def test_types(value, kind):
    assert sql_type(value, "x") == kind


def test_what_contains_itself():
    loop = []
    loop.append(loop)
    for convert in (lambda: plain(loop, where="x"), lambda: sql_type(loop, "x")):
        with pytest.raises(SettingError, match="x is nested too deeply"):
            convert()


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(1, 2, 3), "1 00:00:02.000003"), (-timedelta(microseconds=1), "-0 00:00:00.000001"),
        (timedelta(hours=23, minutes=59), "0 23:59:00.000000"), (timedelta.min, "-999999999 00:00:00.000000"),
    ],
)  # fmt: skip
def test_intervals(length, text):
    assert plain(length, sql_scalar) == text
