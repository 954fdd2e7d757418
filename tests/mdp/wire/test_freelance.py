"""FLP (C46): frames to commands and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.mdp.wire import Invalid, Reason, flp

MESSAGES = st.lists(st.binary(max_size=6) | st.sampled_from([b"PING", b"PONG"]), min_size=1, max_size=5)
TOO_FEW = Invalid(Reason.TOO_FEW_FRAMES)


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ([b"amy", b"PING"], flp.Ping(b"amy")),
        ([b"amy", b"7", b"hello"], flp.Exchange(b"amy", b"7", [b"hello"])),
        ([b"amy", b"", b""], flp.Exchange(b"amy", b"", [b""])),
        ([b"amy", b"PING", b"x"], flp.Exchange(b"amy", b"PING", [b"x"])),  # of two frames or more: a request
        ([b"amy", b"7", b"a", b"b"], flp.Exchange(b"amy", b"7", [b"a", b"b"])),
        ([b"amy", b"7"], TOO_FEW),
        ([b"amy", b""], TOO_FEW),
        ([b"amy", b"ping"], TOO_FEW),
        ([b"amy", b"PONG"], TOO_FEW),
        ([b"amy"], TOO_FEW),
    ],
)
def test_what_a_client_sends(message, command):  # C46
    assert flp.decode_client(message) == command


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ([b"tcp://a:1", b"PONG"], flp.Pong(b"tcp://a:1")),
        ([b"tcp://a:1", b"7", b"OK"], flp.Exchange(b"tcp://a:1", b"7", [b"OK"])),
        ([b"tcp://a:1", b"PING"], TOO_FEW),
        ([b"tcp://a:1", b"7"], TOO_FEW),
        ([b"tcp://a:1"], TOO_FEW),
    ],
)
def test_what_a_server_sends(message, command):  # C46
    assert flp.decode_server(message) == command


def test_what_is_encoded_is_decoded():
    assert flp.decode_client(flp.ping(b"a")) == flp.Ping(b"a")
    assert flp.decode_server(flp.pong(b"a")) == flp.Pong(b"a")
    assert flp.decode_client(flp.exchange(b"a", b"1", [b"x", b"y"])) == flp.Exchange(b"a", b"1", [b"x", b"y"])


@given(MESSAGES)
def test_whatever_arrives_is_a_command_or_invalid(message):
    for command in (flp.decode_client(message), flp.decode_server(message)):
        if isinstance(command, flp.Exchange):
            assert flp.exchange(*command) == message
        else:
            assert isinstance(command, flp.Ping | flp.Pong | Invalid)
