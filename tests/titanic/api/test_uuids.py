"""UUIDs of requests: ordered by time, and impossible to guess."""

import time
from uuid import RFC_4122

from zmdp.titanic.api.uuids import new_uuid


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
