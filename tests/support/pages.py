"""Reads pages of the documentation as a reader does: writes their files, and runs their commands."""

import re
import shlex
import shutil
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.dev import turn
from support.processes import Process, process, run

DOCS = Path(__file__).parents[2] / "docs"
READY = {
    "mdp-broker": ("://", "stdout"),
    "mdworker": ("serving at", "stderr"),
    "titanic serve": ("serving", "stderr"),
    "zmdp dev": ("all are ready", "stderr"),
    "uvicorn": ("Uvicorn running on", "stderr"),
    "python worker.py": None,
}
"""The commands that run until they are stopped, and what they say when they are ready, if anything."""
MODULES = ("python", "pytest", "uvicorn")
UUID = re.compile(r"\b[0-9a-f]{32}\b")


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language in the text of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def sessions(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands in a console block, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0][:-1]}{line.lstrip()}", [])
        else:
            found[-1][1].append(line)
    return found


def write_files(page: str, folder: Path) -> None:
    """Write the files on a page.  The first line of each block names its file, and how the block belongs to it."""
    for block in blocks((DOCS / page).read_text(), "python"):
        found = re.match(r"# ([\w.]+)(?:, at the (top|end))?\n", block)
        assert found, block
        file, text = folder / found[1], block[found.end() :]
        if found[2] == "top":  # replaces everything before the first definition
            _, rest = file.read_text().split("\n\n\n", 1)
            text = f"{text}\n\n{rest}"
        elif found[2] == "end":
            text = f"{file.read_text()}\n\n{text}"
        file.write_text(text)


def need_curl() -> str:
    """Return where curl is, or skip the test if there is none."""
    return shutil.which("curl") or pytest.skip("there is no curl (Debian: apt-get install curl)")


@dataclass
class Reader:
    """Runs the commands of pages in a folder."""

    folder: Path
    stack: ExitStack
    names: dict[str, str] = field(default_factory=dict)
    """What stands in place of what a page shows: endpoints, ports, UUIDs."""
    env: dict[str, str] = field(default_factory=dict)
    servers: dict[str, Process] = field(default_factory=dict)

    def write(self, page: str) -> None:
        """Write the files on a page."""
        write_files(page, self.folder)
        for file in self.folder.glob("*.py"):
            file.write_text(self._named(file.read_text()))

    def read(self, page: str) -> None:
        """Run all commands of a page: each must print what the page shows, in which … stands for any text."""
        for block in blocks((DOCS / page).read_text(), "console"):
            for command, printed in sessions(block):
                self.run(command, printed)

    def run(self, command: str, printed: list[str]) -> None:
        """Run a command; a server is left running once it is ready."""
        words = shlex.split(self._named(command))
        if words[0] in MODULES:  # also where they are not installed as commands of their own
            words = [sys.executable, *(["-m", words[0]] if words[0] != "python" else []), *words[1:]]
        elif words[0] == "curl":
            words[0] = need_curl()
        if words[0] == "export":
            self.env |= dict(word.split("=", 1) for word in words[1:])
            return
        for server, said in READY.items():
            if command.startswith(server):
                with turn() if server == "zmdp dev" else nullcontext():
                    running = self.stack.enter_context(process(*words, cwd=self.folder, **self.env))
                    if said is not None:
                        running.line(*said)
                if server == "zmdp dev":  # its addresses may be others than those of the page
                    self.env["MDP_BROKER"] = running.line("broker", "stdout").split()[1]
                self.servers[command] = running
                return
        done = run(*words, cwd=self.folder, **self.env)
        assert done.returncode == 0, (command, done)
        out = done.stdout.decode()
        for shown, given in zip(UUID.findall("\n".join(printed)), UUID.findall(out), strict=False):
            self.names.setdefault(shown, given)
        if printed:
            pattern = re.escape(self._named("\n".join(printed).rstrip())).replace("…", ".*")
            assert re.fullmatch(pattern, out.rstrip()), (command, out)

    def _named(self, text: str) -> str:
        for shown, given in self.names.items():
            text = text.replace(shown, given)
        return text
