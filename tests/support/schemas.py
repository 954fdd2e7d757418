"""How the installed msgspec writes schemas."""

import re
from typing import Final

import msgspec

TELLS_EMPTY_DEFAULTS: Final = tuple(map(int, re.findall(r"\d+", msgspec.__version__)[:2])) >= (0, 23)
"""It tells that a field's default is an empty list or object."""
