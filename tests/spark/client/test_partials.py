"""What clients show of a job's events, without Spark."""

import json

from zmdp.clients import Reply
from zmdp.spark.client.partials import showing


def test_who_waits_is_told_of_another_attempt(capsys):
    """Its PARTIALs begin anew, so the one that names the job may be passed over."""
    progress = {"event": "progress", "tasks": 1, "tasks_done": 0, "stages": 1, "stages_done": 0, "seconds": 1}
    events = [{"event": "started", "job": "a", "driver": "d"}, {**progress, "job": "a"}, {**progress, "job": "b"}]
    for _ in showing(Reply([json.dumps(each).encode()], service="s", final=False) for each in events):
        pass
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "job a on d"
    assert shown[1] == "another attempt: job b"
