"""The server's loop, what can be said of it without its clock."""

from zmdp.mdp.broker.server import Server
from zmdp.mdp.limits import Limits


def test_it_sleeps_for_an_interval_at_most_while_something_is_due():
    """Else it would take a long sleep for its process having been held up, and be late with what is due."""
    with Server(("inproc://server",), limits=Limits(heartbeat=2, expiry=60)) as server:
        assert server._wait(0.0, None) is None
        server.broker.receive([b"c", b"MDPC02", b"\x01", b"nobody", b"x"], 0.0)
        assert server._wait(0.0, None) == 2000
        assert server._wait(59.0, None) in range(900, 1100)
