"""The exceptions: one tree, and fit to travel between processes."""

import pickle

import pytest

from zmdp.mdp import errors

ERRORS = [each for each in vars(errors).values() if isinstance(each, type)]


@pytest.mark.parametrize("kind", ERRORS)
def test_all_errors_share_one_base_class(kind):
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
        errors.RequestRejected("no", service="echo", code=413),
        errors.RetryLater("full", service="echo", code=429),
        errors.RequestCancelled("gone", service="echo", code=499),
        errors.WorkerLost("lost", service="echo", code=502),
    ],
)
def test_an_error_survives_pickling(error):
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other), other.service, other.code) == (type(error), str(error), "echo", error.code)


def test_the_message_includes_the_code_if_there_is_one():
    assert errors.RequestTimeout("no reply", service="echo").code is None
    assert errors.RequestTimeout("no reply", service="echo", code=408).code == 408


def test_a_service_error_keeps_its_detail():
    error = errors.ServiceError(422, "not that", b"\0detail", service="echo")
    other = pickle.loads(pickle.dumps(error))
    assert (other.code, other.text, other.detail, other.service) == (422, "not that", b"\0detail", "echo")


def test_the_message_of_a_service_error_is_complete():
    assert (
        str(errors.ServiceError(500, "ValueError: x", service="echo"))
        == "service 'echo' failed with 500: ValueError: x"
    )
