"""UUIDs of requests: ordered by time, and impossible to guess."""

import os
import time
from uuid import RFC_4122, UUID

from zmdp.titanic.uuids import new_uuid, new_uuid_hex


def milliseconds(uuid):
    return uuid.int >> 80


def test_a_uuid_is_of_version_7_and_has_the_time():
    before = time.time_ns() // 1_000_000
    uuid = new_uuid()
    assert (uuid.version, uuid.variant) == (7, RFC_4122)
    assert before <= milliseconds(uuid) <= time.time_ns() // 1_000_000


def test_as_hex_digits():
    before, digits, after = new_uuid(), new_uuid_hex(), new_uuid()
    assert len(digits) == 32
    uuid = UUID(digits)
    assert (uuid.hex, uuid.version, uuid.variant) == (digits, 7, RFC_4122)
    assert milliseconds(before) <= milliseconds(uuid) <= milliseconds(after)


def test_all_other_bits_are_random():
    uuids = [new_uuid().int for _ in range(3000)]
    assert len(set(uuids)) == len(uuids)
    fixed = (1 << 128) - (1 << 80) | 0xF << 76 | 0b11 << 62
    ever = never = 0
    for each in uuids:
        ever |= each
        never |= ~each
    assert ever & never | fixed == (1 << 128) - 1


def test_a_child_process_creates_other_uuids():
    new_uuid()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"".join(new_uuid().bytes for _ in range(100)))
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reading, 100 * 16)
    os.close(reading)
    os.close(writing)
    random = (1 << 62) - 1
    theirs = {int.from_bytes(told[at : at + 16], "big") & random for at in range(0, len(told), 16)}
    assert len(theirs) == 100
    assert theirs.isdisjoint({new_uuid().int & random for _ in range(100)})
