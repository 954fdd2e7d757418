import json

import pytest
from support.x1_messages import ready

from zmdp.mdp import wire
from zmdp.mdp.wire import batch
from zmdp.mdp.wire.options import MAX_ABOUT, encode_about


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("two\n\tlines", "two\n\tlines"),
        ("größe", "größe"),
        ("\x1b[2Jgone", "?[2Jgone"),
        ("a\x00b\x7fc\x9bd", "a?b?c?d"),
        ("right\u202eleft", "right?left"),
        ("half \ud800", "half ?"),
    ],
)
def test_characters_that_could_control_a_terminal_are_replaced(given, kept):
    about = {given: [given, {"inner": given}], "number": 1.5, "none": None, "yes": True}
    expected = {kept: [kept, {"inner": kept}], "number": 1.5, "none": None, "yes": True}
    assert json.loads(encode_about(about)) == expected


def test_what_is_cleaned_again_stays_the_same():
    once = encode_about({"description": "\x1bé\u202e"})
    assert encode_about(json.loads(once)) == once


@pytest.mark.parametrize(("size", "is_kept"), [(MAX_ABOUT, True), (MAX_ABOUT + 1, False)])
def test_what_is_too_large_is_left_out_of_ready(size, is_kept):
    about = {"description": "x" * (size - len(encode_about({"description": ""})))}
    message = ready(about=about, name="w")
    (command,) = batch.from_worker(message, 2, (b"w", b""), wire.NO_LIMIT, wire.NO_LIMIT)
    assert command.name == "w"
    assert command.about == (encode_about(about) if is_kept else b"")
