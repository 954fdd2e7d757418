"""Requests to Titanic's services: each option, invalid values, and arbitrary input."""

import json
import os
import re
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from uuid import RFC_4122, UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zmdp.mdp.errors import SettingError
from zmdp.titanic import Titanic
from zmdp.titanic.api.submission import (
    MAX_FROM,
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    MAX_RETRIES,
    MAX_SECONDS,
    OPTIONS,
    UUID_OPTION,
    DurationOption,
    MalformedRequest,
    ReplyRequest,
    Submission,
    SubmissionOptions,
    encode_options,
    new_uuid,
    pack,
    parse_close,
    parse_reply_request,
    parse_submission,
    parse_uuid,
    unpack,
)
from zmdp.titanic.operator.command.parameter_types import flag
from zmdp.workers.handling import MAX_BODY, MAX_BODY_FRAMES

NOW = 1_800_000_000.0
CENTURY = MAX_SECONDS * 1000
UUID_TEXT = b"00112233445566778899aabbccddeeff"
HUGE = 10**400
"""A number that JSON can carry and no float can hold."""


def asked(*frames, **options):
    return parse_submission(frames or (b"echo", b"body"), options, NOW)


# ── titanic.request ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_without_options():
    made = asked(b"echo", b"one", b"", b"three")
    assert made == Submission(uuid=made.uuid, service="echo", body=made.body, created=NOW, due=NOW)
    assert unpack(made.body) == [b"one", b"", b"three"]
    assert made.uuid.version == 7


def test_every_request_has_a_uuid_of_its_own():
    assert len({asked().uuid for _ in range(2000)}) == 2000


def test_a_forked_process_creates_other_uuids():
    asked()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn if another test has left a thread
        child = os.fork()
    if not child:
        os.write(writing, asked().uuid.bytes)
        os._exit(0)
    os.waitpid(child, 0)
    theirs = UUID(bytes=os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    assert theirs not in {asked().uuid for _ in range(1000)}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"key": "k"}, {"key": "k", "key_expires": None}),
        ({"key": "k", "key_ttl": 1500}, {"key": "k", "key_expires": NOW + 1.5}),
        ({"key": "ü" * (MAX_KEY_BYTES // 2)}, {"key": "ü" * (MAX_KEY_BYTES // 2)}),
        ({"key": None}, {"key": None}),
        ({"delay": 250}, {"due": NOW + 0.25}),
        ({"delay": 0}, {"due": NOW}),
        ({"delay": 0.5}, {"due": NOW + 0.0005}),
        ({"delay": CENTURY}, {"due": NOW + MAX_SECONDS}),
        ({"at": (NOW + 60) * 1000}, {"due": NOW + 60}),
        ({"at": int(NOW + 60) * 1000}, {"due": NOW + 60}),
        ({"at": 0}, {"due": NOW}),
        ({"at": "2030-01-31T12:00:00+00:00"}, {"due": datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()}),
        ({"at": "2030-01-31T12:00:00Z"}, {"due": datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()}),
        ({"at": "2030-01-31T12:00:00-05:00"}, {"due": datetime(2030, 1, 31, 17, tzinfo=UTC).timestamp()}),
        ({"at": "1999-01-01T00:00:00Z"}, {"due": NOW}),
        ({"priority": 9, "retries": 3}, {"priority": 9, "retries": 3}),
        ({"priority": 0, "retries": MAX_RETRIES}, {"priority": 0, "retries": MAX_RETRIES}),
        ({"backoff": 100, "result_ttl": 1}, {"backoff": 0.1, "result_ttl": 0.001}),
        ({"headers": {"a": "ü"}}, {"headers": '{"a": "\\u00fc"}'}),
        ({"headers": {}}, {"headers": None}),
        ({"wait": False, "broker": "b"}, {"due": NOW, "headers": None}),
        ({"priority": None, "retries": None}, {"priority": 0, "retries": 0}),
        ({"uuid": UUID_TEXT.decode()}, {"uuid": UUID(UUID_TEXT.decode())}),
        ({"uuid": UUID_TEXT.decode().upper(), "key": None}, {"uuid": UUID(UUID_TEXT.decode()), "key": None}),
    ],
    ids=str,
)
def test_options_of_a_request(options, fields):
    made = asked(**options)
    assert {name: getattr(made, name) for name in fields} == fields


TIMES = "{} must be a number of milliseconds"
WHOLE = "{} must be a whole number"
AT = "at must be milliseconds since 1970"
FAR = "at must not be further away"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[({name: value}, TIMES.format(name)) for name in ("delay", "backoff", "result_ttl") for value in (
            -1, "5", True, [], CENTURY + 1, HUGE, float("nan"), float("inf"),
        )],
        *[({name: 0}, TIMES.format(name)) for name in ("backoff", "result_ttl")],
        ({"key": "k", "key_ttl": 0}, TIMES.format("key_ttl")),
        ({"key": "k", "key_ttl": "1"}, TIMES.format("key_ttl")),
        ({"key_ttl": 5}, "key_ttl needs a key"),
        *[({"key": value}, "key must be text") for value in (
            "", 5, True, ["k"], "a\0b", "\ud800", "k" * 256, "ü" * 128,
        )],
        *[({name: value}, WHOLE.format(name)) for name in ("priority", "retries") for value in (
            -1, 1.0, "1", True, HUGE,
        )],
        ({"priority": MAX_PRIORITY + 1}, WHOLE.format("priority")),
        ({"retries": MAX_RETRIES + 1}, WHOLE.format("retries")),
        *[({"at": value}, AT) for value in ("soon", "", "2030-01-31", "2030-01-31T12:00:00", "\ud800", True, {}, [5])],
        *[({"at": value}, FAR) for value in (HUGE, -HUGE, 1e300, "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00",
                                             float("inf"), float("nan"))],
        ({"delay": 5, "at": 5}, "cannot be combined"),
        ({"key": "k", "uuid": UUID_TEXT.decode()}, "key and uuid cannot be combined"),
        *[({"headers": given}, "headers must map text to text") for given in (
            {"a": "\ud800"}, {"\ud800": "a"}, {"a": 5}, ["a"], "a",
        )],
        ({"deley": 5}, "titanic.request has no option 'deley': its options are uuid, key, "),
        ({"x" * 100: 5}, "no option 'x"),
        ({"partials": True}, "no option 'partials'"),
        *[({"uuid": value}, "uuid must be 32 hex digits") for value in ("", "x", "0" * 31, "é" * 32, "\ud800", 5, {})],
    ],
    ids=lambda value: str(value)[:50].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_an_invalid_option_is_rejected(options, said):
    with pytest.raises(MalformedRequest, match=re.escape(said)) as refused:
        asked(**options)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "needs the name of a service"),
        ([b"echo"], "needs the name of a service"),
        ([b"", b"x"], "must be the service's name"),
        ([b"a\0b", b"x"], "must be the service's name"),
        ([b"\xff", b"x"], "must be the service's name"),
        ([b"e" * 256, b"x"], "must be the service's name"),
        ([b"mmi.service", b"x"], "mmi.service cannot be called through Titanic"),
        ([b"titanic.request", b"x"], "titanic.request cannot be called through Titanic"),
        ([b"titanic.", b"x"], "titanic. cannot be called through Titanic"),
        ([b"echo", bytes(MAX_BODY), b"x"], "the body is too large"),
        ([b"echo", *[b""] * (MAX_BODY_FRAMES + 1)], "the body is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # the body takes long to print
)
def test_invalid_frames_are_rejected(frames, said):
    with pytest.raises(MalformedRequest, match=re.escape(said)):
        parse_submission(frames, {}, NOW)


def test_the_largest_body():
    assert len(unpack(asked(b"echo", bytes(MAX_BODY)).body)[0]) == MAX_BODY
    assert len(unpack(asked(b"echo", *[b""] * MAX_BODY_FRAMES).body)) == MAX_BODY_FRAMES


def test_a_service_may_have_titanic_in_its_name():
    assert asked(b"titanic", b"x").service == "titanic"
    assert asked(b"my.titanic.request", b"x").service == "my.titanic.request"


# ── what Python programs pass ────────────────────────────────────────────────────────────────────────────────────────


def test_options_go_on_the_wire_and_come_back():
    at = datetime(2030, 1, 31, 12, tzinfo=UTC)
    given = {
        "key": "k", "key_ttl": 60, "at": at, "priority": 7, "retries": 3, "backoff": 0.25, "ttl": 86400.0,
        "group": "tenant-7", "on_duplicate": "replace",
    }  # fmt: skip
    made = asked(**json.loads(json.dumps(encode_options(given))))
    assert made._replace(uuid=None, body=b"") == Submission(
        uuid=None, service="echo", body=b"", created=NOW, due=at.timestamp(), key="k", key_expires=NOW + 60, priority=7,
        retries=3, backoff=0.25, result_ttl=86400.0, group_name="tenant-7", replaces=True,
    )  # fmt: skip
    assert asked(**encode_options({"delay": 1.5})).due == NOW + 1.5
    assert encode_options(dict.fromkeys(OPTIONS)) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": 10}, "priority must be a whole number from 0 to 9"),
        ({"ttl": 0}, "ttl is 0: it must be a number of seconds, above 0, at most a hundred years"),
        ({"delay": -1}, "delay is -1: it must be a number of seconds, 0 or more"),
        ({"at": datetime(2030, 1, 1)}, "it must have a tzinfo"),
        ({"at": 1e300}, "at must not be further away"),
        ({"at": float("nan")}, "at must not be further away"),
        ({"at": "2030"}, "at is '2030': it must be a datetime"),
        ({"key": ""}, "key must be text of 1 to 255 bytes"),
        ({"key_ttl": 5}, "key_ttl needs a key"),
        ({"delay": 1, "at": 1}, "delay and at cannot be combined"),
    ],
    ids=str,
)
def test_an_invalid_argument_is_a_setting_error(options, said):
    with pytest.raises(SettingError, match=re.escape(said)):
        encode_options(options)


def test_a_misspelt_argument_is_a_type_error():
    with pytest.raises(TypeError, match=r"no option 'priorty': its options are key, on_duplicate, key_ttl, delay"):
        encode_options({"priorty": 5})


def test_the_docstring_of_submit_describes_every_option():
    assert [name for name in OPTIONS if f" {name}: " not in Titanic.submit.__doc__] == []


def test_every_declared_option_has_a_help_and_a_column():
    assert list(OPTIONS) == list(SubmissionOptions.__annotations__)
    for option in OPTIONS.values():
        assert option.help.endswith(".")
    stored = set(Submission._fields) | {"delay", "at", "key_ttl", "group", "on_duplicate"}
    assert {option.wire_name or name for name, option in OPTIONS.items()} <= stored


def test_the_page_documents_each_option_as_it_is_declared():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "titanic.md").read_text()
    assert f"| | | `uuid` | {UUID_OPTION.help} | {UUID_OPTION.default} |" in page.splitlines()
    for name, option in OPTIONS.items():
        row = f"| `{name}` | `{flag(name)}` | `{option.wire_name or name}` | {option.help} | {option.default} |"
        assert row in page.splitlines()


def test_what_deletes_something_needs_a_unit_on_the_command_line():
    assert [name for name, option in OPTIONS.items() if isinstance(option, DurationOption) and option.expiry] == [
        "key_ttl", "ttl",
    ]  # fmt: skip


# ── titanic.reply, titanic.close ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, 0, False)),
        ({"partials": True}, (True, 0, False)),
        ({"partials": True, "from": 7}, (True, 7, False)),
        ({"partials": False}, (False, 0, False)),
        ({"wait": True}, (False, 0, True)),
        ({"wait": False}, (False, 0, False)),
        ({"partials": True, "wait": True, "from": 0, "broker": "b"}, (True, 0, True)),
    ],
    ids=str,
)
def test_options_of_a_reply(options, expected):
    assert parse_reply_request([UUID_TEXT], options) == ReplyRequest(UUID(UUID_TEXT.decode()), *expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partials": 1}, "partials must be true or false"),
        ({"partials": None}, "partials must be true or false"),
        ({"from": 0}, "from needs partials"),
        ({"partials": False, "from": 0}, "from needs partials"),
        *[
            ({"partials": True, "from": value}, "from must be a whole number")
            for value in (-1, 0.0, "0", None, True, MAX_FROM + 1, HUGE)
        ],
        ({"request": 1}, "request must be true or false"),
        ({"request": True, "partials": True}, "request must be true or false, and without partials"),
        ({"key": "k"}, "titanic.reply has no option 'key': its options are partials, from, request"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_option_of_a_reply_is_rejected(options, said):
    with pytest.raises(MalformedRequest, match=re.escape(said)):
        parse_reply_request([UUID_TEXT], options)


def test_a_close():
    assert parse_close([UUID_TEXT], {"headers": {"a": "b"}, "wait": True, "broker": "b"}) == UUID(UUID_TEXT.decode())
    with pytest.raises(MalformedRequest, match=r"titanic.close has no option 'key': it has none"):
        parse_close([UUID_TEXT], {"key": "k"})


@pytest.mark.parametrize("text", [UUID_TEXT, UUID_TEXT.upper(), b"0" * 32, b"f" * 32, b"01234567abcDEF89" * 2])
def test_32_hex_digits_are_a_uuid(text):  # C30
    assert parse_uuid(text) == UUID(text.decode())


NO_UUIDS = [
    b"", b"x", UUID_TEXT[:-1], UUID_TEXT + b"0", b"g" * 32, b"0x" + b"a" * 30, b"0X" + b"1" * 30, b"-" + b"1" * 31,
    b"+" + b"1" * 31, b" " + b"1" * 31, b"1_" * 16, b"{" + b"1" * 30 + b"}", str(UUID(UUID_TEXT.decode())).encode(),
    b"urn:uuid:" + b"1" * 23, b"/etc/passwd" + b"0" * 21, b"\0" * 32, b"\xff" * 32, b"1" * 31 + b"\n",
    "١".encode() * 16,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_UUIDS, ids=repr)
def test_anything_else_is_none(text):  # C30
    assert parse_uuid(text) is None


@pytest.mark.parametrize("read", [parse_reply_request, parse_close])
@pytest.mark.parametrize("frames", [[], [b"x"], [UUID_TEXT, b""], [UUID_TEXT, UUID_TEXT]], ids=str)
def test_frames_that_are_not_a_uuid_are_rejected(read, frames):
    with pytest.raises(MalformedRequest, match="needs one frame, a UUID: 32 hex digits"):
        read(frames, {})


# ── anything ─────────────────────────────────────────────────────────────────────────────────────────────────────────

numbers = st.integers() | st.floats() | st.sampled_from([HUGE, -HUGE, 0, 1, -0.0, CENTURY, 1e-320])
moments = st.datetimes(timezones=st.sampled_from([UTC, None])).map(datetime.isoformat)
texts = st.text(max_size=40) | moments | st.sampled_from(["\ud800", "a\0b", "k" * 300])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = [
    "key", "key_ttl", "delay", "at", "priority", "retries", "backoff", "result_ttl", "partials", "from", "wait",
]  # fmt: skip
options = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=60), values, max_size=6)
headers = st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3)
names = st.binary(max_size=20) | st.sampled_from([b"echo", b"titanic.reply", b"mmi.service", "größe".encode()])
frames = st.lists(names | st.sampled_from([UUID_TEXT, *NO_UUIDS]), max_size=4)


@given(st.sampled_from(NAMES[:8]), values)
@example("at", HUGE)
@example("delay", HUGE)
def test_any_value_of_any_option_is_accepted_or_rejected(name, value):
    try:
        made = asked(**{name: value})
    except MalformedRequest:
        return
    assert isinstance(made, Submission)
    check(made)


@given(frames, options, headers | st.none())
def test_any_request_is_accepted_or_rejected(frames, options, headers):
    given = options if headers is None else {**options, "headers": headers}
    for read in (lambda *asked: parse_submission(*asked, NOW), parse_reply_request, parse_close):
        try:
            made = read(frames, MappingProxyType(given))
        except MalformedRequest:
            continue
        if isinstance(made, Submission):
            check(made)
        else:
            assert isinstance(made, ReplyRequest | UUID)


def check(made):
    """Assert what both databases and the dispatcher need of every submission."""
    assert NOW == made.created <= made.due <= NOW + 3 * MAX_SECONDS
    assert 0 <= made.priority <= 9
    assert 0 <= made.retries <= 1000
    assert made.key is None or ("\0" not in made.key and 1 <= len(made.key.encode()) <= 255)
    for each in (made.backoff, made.result_ttl):
        assert each is None or 0 <= each <= MAX_SECONDS
    assert made.key_expires is None or NOW <= made.key_expires <= NOW + MAX_SECONDS
    assert made.headers is None or (isinstance(json.loads(made.headers), dict) and made.headers.isascii())
    assert unpack(made.body)


@given(st.sampled_from(["partials", "from", "wait"]), values, st.booleans())
@example("from", HUGE, True)
def test_any_value_of_a_replys_options_is_accepted_or_rejected(name, value, partials):
    try:
        made = parse_reply_request([UUID_TEXT], {"partials": partials, name: value})
    except MalformedRequest:
        return
    assert isinstance(made.partials, bool)
    assert isinstance(made.wait, bool)
    assert made.start >= 0


@given(st.binary(max_size=40) | st.text("0123456789abcdefABCDEFxX-_ +", min_size=32, max_size=32).map(str.encode))
def test_only_32_hex_digits_are_a_uuid(text):  # C30
    found = parse_uuid(text)
    assert (found is not None) == bool(re.fullmatch(rb"[0-9a-fA-F]{32}", text))
    assert found is None or found.hex == text.decode().lower()


# ── what the database stores ─────────────────────────────────────────────────────────────────────────────────────────


bodies = st.lists(st.binary(max_size=300), max_size=20)


@given(bodies)
def test_unpack_reverses_pack(frames):
    assert unpack(pack(frames)) == frames


@given(bodies, bodies)
def test_different_frames_are_packed_differently(one, other):
    assert (pack(one) == pack(other)) == (one == other)


@pytest.mark.parametrize(
    ("frames", "packed"),
    [
        ([], b""),
        ([b""], b"\0\0\0\0"),
        ([b"ab", b"", b"c"], b"\0\0\0\x02ab\0\0\0\0\0\0\0\x01c"),
        ([bytes(0x010203)], b"\x00\x01\x02\x03" + bytes(0x010203)),
    ],
    ids=["none", "one that is empty", "several", "a large one"],
)
def test_the_stored_format(frames, packed):
    assert pack(frames) == packed
    assert unpack(packed) == frames


@given(bodies.filter(bool), st.data())
def test_unpack_rejects_truncated_values(frames, data):
    packed = pack(frames)
    whole = {len(pack(frames[:number])) for number in range(len(frames))}
    at = data.draw(st.integers(0, len(packed) - 1).filter(lambda at: at not in whole))
    with pytest.raises(ValueError, match="truncated"):
        unpack(packed[:at])


@given(st.binary(max_size=60))
def test_unpack_returns_frames_or_raises(packed):
    try:
        frames = unpack(packed)
    except ValueError:
        return
    assert pack(frames) == packed


def milliseconds(uuid):
    return uuid.int >> 80


def test_a_uuid_is_of_version_7_and_has_the_time():
    before = time.time_ns() // 1_000_000
    uuid = new_uuid()
    assert (uuid.version, uuid.variant) == (7, RFC_4122)
    assert before <= milliseconds(uuid) <= time.time_ns() // 1_000_000


def test_all_other_bits_are_random():
    uuids = [new_uuid().int for _ in range(3000)]
    assert len(set(uuids)) == len(uuids)
    fixed = (1 << 128) - (1 << 80) | 0xF << 76 | 0b11 << 62
    ever = never = 0
    for each in uuids:
        ever |= each
        never |= ~each
    assert ever & never | fixed == (1 << 128) - 1
