"""Show what an access file says."""

import json
from collections.abc import Sequence
from typing import Any, Final

from ..security.access import LIMITS, Access, Permissions, written

SHOWN_DIGEST: Final = 15
"""Characters of a token's digest that are shown."""


def as_text(access: Access) -> str:
    """Return who may do what, as a table for each role."""
    rows: list[tuple[str, str]] = [("broker's key", access.public_key.decode())]
    text = [_table(f"{access.path}", rows)]
    for name, role in access.roles.items():
        limits = [f"{getattr(role, each.name)} {_words(each.name)}" for each in LIMITS if getattr(role, each.name)]
        tokens = _tokens(access, name)
        rows = [
            ("keys", ", ".join(access.keys_of(name)) or ("none" if tokens else "none: nobody has this role")),
            ("tokens", ", ".join(f"{each[:SHOWN_DIGEST]}…" for each in tokens) or "none"),
            ("may call", " ".join(role.call) or "nothing"),
            ("may offer", " ".join(role.offer) or "nothing"),
            ("mmi", role.mmi),
            ("admin", _yes(role.admin)),
            ("on behalf", _yes(role.on_behalf)),
            ("link", _yes(role.link)),
            ("limits", ", ".join(limits) or "none"),
        ]
        text.append(_table(f"role {name}", rows))
    if access.limits:
        text.append(_table("limits of services", [(pattern, str(each)) for pattern, each in access.limits.items()]))
    return "\n\n".join(text)


def as_json(access: Access) -> str:
    """Return who may do what, as JSON."""
    roles = {
        name: {"keys": access.keys_of(name), "tokens": _tokens(access, name), **_settings(role)}
        for name, role in access.roles.items()
    }
    limits = {pattern: each.as_dict() for pattern, each in access.limits.items()}
    found = {"public_key": access.public_key.decode(), "roles": roles, "limits": limits}
    return json.dumps(found, ensure_ascii=False)


def key_rows(access: Access) -> list[dict[str, str]]:
    """Return each key: its role, what the file calls it, and the key itself."""
    return [{"role": role, "name": access.named[key], "public_key": key.decode()} for key, role in access.keys.items()]


def _tokens(access: Access, role: str) -> list[str]:
    """Return the digests of the role's tokens, as the file has them."""
    return [written(digest) for digest, name in access.tokens.items() if name == role]


def _settings(role: Permissions) -> dict[str, Any]:
    names = ("call", "offer", "mmi", "admin", "on_behalf", "link", *(limit.name for limit in LIMITS))
    return {name: getattr(role, name) for name in names}


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
