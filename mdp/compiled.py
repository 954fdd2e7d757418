"""Which modules are compiled.  With `ZMDP_PURE=1` in the environment none is."""

from importlib.util import find_spec

from ..pure import PURE

_MODULES = {
    "multipart": f"{__package__}.transport.multipart_cython",
    "batch": f"{__package__}.wire.batch_cython",
    "machines": f"{__package__}.broker.machine",
}


def parts() -> dict[str, bool]:
    """Report what is compiled: moving messages, packing batches, and the protocol's machines."""
    return {part: _is_compiled(module) for part, module in _MODULES.items()}


def _is_compiled(module: str) -> bool:
    spec = None if PURE else find_spec(module)
    return spec is not None and spec.origin is not None and not spec.origin.endswith((".py", ".pyx"))


def told() -> str:
    """The same in words, for `--version`."""
    have = parts()
    if all(have.values()):
        return "compiled"
    if not any(have.values()):
        return "pure Python, as ZMDP_PURE asks" if PURE else "pure Python"
    return ", ".join(f"{name} {'compiled' if there else 'pure Python'}" for name, there in have.items())
