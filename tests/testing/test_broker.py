from zmdp.testing import free_endpoint
from zmdp.testing.broker import FIXED_PORTS


def test_no_endpoint_is_returned_twice():
    found = [free_endpoint() for _ in range(len(FIXED_PORTS) // 2)]
    assert len(set(found)) == len(found)
