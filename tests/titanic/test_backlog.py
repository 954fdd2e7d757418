"""How much room there is for requests."""

from zmdp.titanic.backlog import Backlog
from zmdp.titanic.metrics import Metrics


def test_what_a_service_has_beyond_its_share_takes_no_room_from_others():
    backlog = Backlog(Metrics(), 4, 2)
    backlog.counted({"bulk": 3_000_000, "": 1})
    assert backlog.why_full("bulk") == (
        "full: 2 requests to bulk have not ended (--max-waiting-per-service); try again later"
    )
    assert backlog.why_full("other") is None
    backlog.accepted("other", 1, 0)
    assert backlog.why_full("other") == "full: 4 requests have not ended (--max-waiting); try again later"
    assert backlog.take_refused()
    backlog.ended("other", None)
    assert backlog.why_full("other") is None
    backlog.counted({"bulk": 1})
    assert backlog.why_full("bulk") is None
    for _ in range(2):  # more than were counted: they began before
        backlog.ended("bulk", None)
    backlog.accepted("bulk", 1, 0)
    assert backlog.why_full("bulk") is None
