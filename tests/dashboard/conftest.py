"""Fixtures for tests of the web server."""

import pytest
from support.web import web_broker


@pytest.fixture(scope="session")
def plain():
    """A broker without access control, for tests that leave it as it was."""
    with web_broker() as broker:
        yield broker
