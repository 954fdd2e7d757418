"""What of zmdp runs compiled.  `ZMDP_PURE=1` in the environment asks for none of it."""

from ..pure import PURE


def parts() -> dict[str, bool]:
    """Whether the two functions that move messages, and the protocol's machines, are compiled."""
    from . import broker, multipart  # noqa: PLC0415 - both come after this

    return {"multipart": multipart.COMPILED, "machines": not broker.__file__.endswith(".py")}


def told() -> str:
    """The same in words, for `--version`."""
    have = parts()
    if all(have.values()):
        return "compiled"
    if not any(have.values()):
        return "pure Python, as ZMDP_PURE asks" if PURE else "pure Python"
    return ", ".join(f"{name} {'compiled' if there else 'pure Python'}" for name, there in have.items())
