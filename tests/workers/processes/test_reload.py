"""Watching source files."""

import threading
from queue import SimpleQueue

from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.workers.processes.reload import watch_sources


def test_sources_are_watched_until_the_end(tmp_path):
    """A thread that is in watchfiles' code when Python ends may abort the process."""
    told: SimpleQueue[str] = SimpleQueue()

    def change():
        (tmp_path / "module.py").write_text("")
        return not told.empty()

    with watch_sources([tmp_path], told.put):
        eventually(change)  # it takes some time until changes are noticed
        assert told.get(timeout=TIMEOUT_SECONDS) == "module.py changed"
    assert "reload" not in {thread.name for thread in threading.enumerate()}
