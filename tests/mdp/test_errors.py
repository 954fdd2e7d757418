"""The exceptions: one tree, and fit to travel between processes."""

import pickle

import pytest

from zmdp.mdp import errors

ERRORS = [each for each in vars(errors).values() if isinstance(each, type)]


@pytest.mark.parametrize("kind", ERRORS)
def test_one_tree(kind):
    assert issubclass(kind, errors.ZmdpError)
    assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestTimeout("no reply", service="echo"),
        errors.BrokerUnreachable("nobody there", service="echo"),
        errors.StreamInterrupted("stopped", service="echo"),
        errors.ServiceNotFound("nobody", service="echo"),
        errors.ServiceError(500, "ValueError: x", service="echo"),
    ],
)
def test_an_error_survives_pickling(error):
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other), other.service) == (type(error), str(error), "echo")


def test_a_service_error_tells_all():
    assert (
        str(errors.ServiceError(500, "ValueError: x", service="echo"))
        == "service 'echo' failed with 500: ValueError: x"
    )
