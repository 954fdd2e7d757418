"""Hooks for PyInstaller, which finds them by an entry point: https://pyinstaller.org/en/stable/hooks.html."""

from pathlib import Path


def hook_folders() -> list[str]:
    """Return the folder of the hooks."""
    return [str(Path(__file__).parent)]
