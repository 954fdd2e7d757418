"""The modules that PyInstaller cannot see: those of lazy names, and those that compiled modules import."""

from PyInstaller import isolated


def imported() -> list[str]:
    """Return the modules that are imported for the public names.  It runs in a process of its own, without globals."""
    import sys

    before = set(sys.modules)
    import zmdp

    for name in zmdp.__all__:
        getattr(zmdp, name)
    return sorted(name for name in set(sys.modules) - before if getattr(sys.modules[name], "__spec__", None))


hiddenimports: list[str] = isolated.call(imported)
