"""The doors, one after the other."""

import pytest
from doors.adapters import DOORS
from support.titanics import LIMITS

from zmdp.testing import running_broker


@pytest.fixture(params=DOORS)
def kind(request):
    """A kind of door."""
    return DOORS[request.param]


@pytest.fixture
def door(kind, tmp_path):
    """An open door to a broker."""
    with running_broker(limits=LIMITS, drain_timeout=0.0) as server, kind(server.endpoints[0], tmp_path) as door:
        yield door
