"""How much room there is for requests."""

from zmdp.titanic.server.counters import Quota


def test_what_a_service_has_beyond_its_share_takes_no_room_from_others():
    quota = Quota(4, 2)
    quota.counted({"bulk": 3_000_000, "": 1})
    assert quota.why_full("bulk") == (
        "full: 2 requests to bulk have not ended (--max-waiting-per-service); try again later"
    )
    assert quota.why_full("other") is None
    quota.add("other", 1)
    assert quota.why_full("other") == "full: 4 requests have not ended (--max-waiting); try again later"
    assert quota.take_refused()
    quota.add("other", -1)
    assert quota.why_full("other") is None
    quota.counted({"bulk": 1})
    assert quota.why_full("bulk") is None
    for _ in range(2):  # more than were counted: they began before
        quota.add("bulk", -1)
    quota.add("bulk", 1)
    assert quota.why_full("bulk") is None
