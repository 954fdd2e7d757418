"""Numbers, times and links as pages show them."""

from datetime import timedelta
from typing import Final
from urllib.parse import urlencode

NONE: Final = "–"
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def number(value: float | None) -> str:
    """Return a number with thin spaces between thousands; small ones with a digit or two after the point."""
    if value is None:
        return NONE
    if value and abs(value) < 10 and value != int(value):
        return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
    return f"{round(value):,}".replace(",", "\N{THIN SPACE}")


def seconds(value: float | None) -> str:
    """Return a time with its unit."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{1000 * value:.3g} ms" if value >= 0.0001 or not value else f"{1e6 * value:.0f} µs"
    if value < 60:
        return f"{value:.3g} s"
    return span(value)


def span(value: float | None) -> str:
    """Return a long time in its two largest units."""
    if value is None:
        return NONE
    if value < 60:
        return f"{value:.0f} s"
    whole = timedelta(seconds=round(value))
    hours, minutes = whole.seconds // 3600, whole.seconds // 60 % 60
    if whole.days:
        return f"{whole.days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole.seconds % 60} s"


def size(value: float | None) -> str:
    """Return a number of bytes with its unit."""
    if value is None:
        return NONE
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def percent(value: float | None) -> str:
    """Return a share."""
    return NONE if value is None else f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def link(path: str, **query: object) -> str:
    """Return a URL."""
    given = {name: str(value) for name, value in query.items() if value not in {"", None}}
    return f"{path}?{urlencode(given)}" if given else path


FILTERS: Final = {"number": number, "seconds": seconds, "span": span, "size": size, "percent": percent}
