"""What of zmdp runs compiled.  `ZMDP_PURE=1` in the environment asks for none of it."""

from ..pure import PURE


def parts() -> dict[str, bool]:
    """Report what is compiled: moving messages, packing batches, and the protocol's machines."""
    from .wire import batch
    from .broker import machine as broker
    from .transport import multipart  # noqa: PLC0415 - they come after this

    machines = not broker.__file__.endswith(".py")
    return {"multipart": multipart.COMPILED, "batch": batch.COMPILED, "machines": machines}


def told() -> str:
    """The same in words, for `--version`."""
    have = parts()
    if all(have.values()):
        return "compiled"
    if not any(have.values()):
        return "pure Python, as ZMDP_PURE asks" if PURE else "pure Python"
    return ", ".join(f"{name} {'compiled' if there else 'pure Python'}" for name, there in have.items())
