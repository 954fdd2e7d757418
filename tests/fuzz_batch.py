"""Fuzz X1's messages (C43): the module and its source decode any bytes alike, and neither raises.

python tests/fuzz_batch.py --seconds 60          # from a random seed on
python tests/fuzz_batch.py --seed 1234           # one message, shown
"""

import time
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import click

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

MAX_COMMANDS = 256 + 1
INTERESTING = [
    0, 1, 2, 3, 4, 8, 9, 10, 13, 14, 255, 256, 257, 999, 1000, 1024, 65535, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF
]  # fmt: skip
OPTIONS = [
    b"", b"", b"", b"{}", b'{"key":5}', b'{"wait":false}', b"[]", b'{"wait":0}', b"\xff", b'{"a":', b'{"pid":7}'
]  # fmt: skip
SERVICES = [b"echo", b"echo", b"echo", b"mmi.service", b"mmi", b"", b"\xff", b"x" * 255, b"\n", "größe".encode()]


@cache
def implementations() -> dict[str, ModuleType]:
    """Return `batch` in pure Python, and compiled if it is."""
    source = Path(str(batch.__file__)).with_name("batch.py")
    if Path(str(batch.__file__)) == source:
        return {"pure": batch}
    spec = spec_from_file_location("zmdp.mdp.wire.pure_batch", source)
    assert spec
    assert spec.loader
    pure = module_from_spec(spec)
    spec.loader.exec_module(pure)
    return {"pure": pure, "compiled": batch}


# ── what a peer may send ─────────────────────────────────────────────────────────────────────────────────────────────


def integer(random: Random, size: int) -> int:
    value = random.choice(INTERESTING) if random.random() < 0.5 else random.getrandbits(8 * size)
    return value % (1 << 8 * size)


def frame(random: Random) -> Any:
    size = random.choice([0, 1, 3, 20, 20, 20, 300, wire.SHARED - 1, wire.SHARED, wire.SHARED + 1])
    data = random.randbytes(min(size, 20)).ljust(size, b"\0")
    return memoryview(data) if size >= wire.SHARED and random.random() < 0.5 else data


def add(random: Random, packed: Any) -> None:
    """Add one valid command of any kind to `packed`."""
    number = random.choice([0, 1, (1 << 62) - 1, 1 << 62, 1 << 63, (1 << 64) - 1, random.getrandbits(64)])
    body = [frame(random) for _ in range(random.choice([0, 1, 1, 1, 2, 5]))]
    service, options = random.choice(SERVICES), random.choice(OPTIONS)
    kind = random.randrange(7)
    if kind == 0:
        packed.request_to_broker(number, integer(random, 4), service, options, body)
    elif kind == 1:
        packed.request_to_worker(number, integer(random, 4), integer(random, 2), options, body)
    elif kind == 2:
        packed.reply(random.choice([2, 3, 4]), number, body)
    elif kind == 3:
        text, reason = random.choice([b"", b"why", b"\xff"]), random.choice([b"", b"expired", b"\xff" * 300])
        packed.error(random.choice([4, 7]), number, integer(random, 2), text, body, reason, integer(random, 4))
    elif kind == 4:
        packed.signal(random.choice([5, 6, 8, 11, 0, 99]), number)
    elif kind == 5:
        packed.ready(integer(random, 4), service, options)
    else:
        packed.credit(integer(random, 4))


def records_of(random: Random) -> tuple[bytes, list[Any]]:
    """Return records of valid commands, of all directions mixed, and their attachments."""
    packed = batch.Batch((), wire.CX1)
    for _ in range(random.choice([0, 1, 1, 2, 3, 10, 300])):
        add(random, packed)
    messages = packed.messages()
    return (bytes(messages[0][2]), messages[0][3:]) if messages else (b"", [])


def mutated(random: Random, data: bytes) -> bytes:
    """Return `data` with an error somewhere."""
    at = random.randrange(len(data) + 1)
    size = random.choice([1, 2, 4, 8])
    return random.choice([
        data[:at],  # truncated
        data[:at] + data[at + size :],
        data[:at] + random.randbytes(size) + data[at:],
        data[:at] + random.randbytes(size) + data[at + size :],
        data[:at] + integer(random, size).to_bytes(size, "big") + data[at + size :],
        data[:at] + data[random.randrange(len(data) + 1) :],
        data + data[:at],
        data * 30,
    ])  # fmt: skip


def resized(random: Random, data: bytes) -> bytes:
    """Return `data` behind a record of the right size with arbitrary content, so that decoders read the content."""
    content = random.choice(range(12)).to_bytes(1, "big") + random.randbytes(8)
    for _ in range(random.randrange(6)):
        content += integer(random, size := random.choice([1, 2, 4])).to_bytes(size, "big")
        content += random.choice([b"", b"", b"echo", b"{}", b"\0\1\0\0\0\1x"])
    return len(content).to_bytes(4, "big") + content + data


def message_of(random: Random) -> list[Any]:
    """Return a message of X1, or one that is similar."""
    data, attachments = records_of(random)
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        data = random.choice([mutated, mutated, resized])(random, data)[: 1 << 20]
    if attachments and random.random() < 0.2:
        del attachments[random.randrange(len(attachments))]
    if random.random() < 0.2:
        attachments.insert(random.randrange(len(attachments) + 1), frame(random))
    records = memoryview(data) if random.random() < 0.3 else data
    tail = [wire.BATCH, records, *attachments]
    return [b"id", b"", random.choice([wire.CX1, wire.WX1]), *tail[: 1 if random.random() < 0.02 else len(tail)]]


# ── what must come of it ─────────────────────────────────────────────────────────────────────────────────────────────


def body_of(command: Any) -> list[Any]:
    if isinstance(command, wire.Error):
        return command.detail
    return getattr(command, "body", [])


def size_of(frames: list[Any]) -> int:
    """Bytes of `frames`, but for what the broker has in place of a large frame in a question to itself."""
    return sum(len(each) for each in frames if each is not wire.OVERLONG)


def shape(command: Any) -> Any:
    """Return everything about a command that can be compared, types included."""
    fields = [(type(field), tuple(field) if isinstance(field, wire.Options) else field) for field in command]
    return type(command), fields, [type(each) for each in body_of(command)]


def check(message: list[Any], max_body: int, max_frames: int) -> list[list[Any]]:
    """Return the commands of `message`, decoded in every direction.  Raises `AssertionError` if a rule is broken."""
    route = (b"id", b"")
    read = []
    for name, module in implementations().items():
        read.append([
            module.from_client(message, 2, route, max_body, max_frames),
            module.from_worker(message, 2, route, max_body, max_frames),
            module.to_client(message, 2),
            module.to_worker(message, 2),
        ])  # fmt: skip
        for direction, commands in enumerate(read[-1]):
            assert len(commands) <= MAX_COMMANDS, (name, direction, len(commands))
            sizes = [size_of(body_of(command)) for command in commands]
            assert sum(sizes) <= size_of(message), (name, direction)
            if direction < 2:
                assert max(sizes, default=0) <= max_body, (name, direction)
                assert all(len(body_of(command)) <= max_frames for command in commands), (name, direction)
    for other in read[1:]:
        for direction, (ours, theirs) in enumerate(zip(read[0], other, strict=True)):
            assert [*map(shape, ours)] == [*map(shape, theirs)], (direction, ours, theirs)
    return read[0]


def check_packing(seed: int) -> list[list[Any]]:
    """Pack the commands of `seed` and return the messages.  Raises `AssertionError` if the implementations differ."""
    packed = []
    for module in implementations().values():
        random = Random(seed)
        each, lengths, messages = module.Batch((b"id", b""), wire.WX1), [], []
        for _ in range(random.choice([1, 3, 10, 100, 600])):
            add(random, each)
            lengths.append(len(each))
            if random.random() < 0.01:
                messages += each.messages()
        packed.append((lengths, messages + each.messages()))
    assert all(found == packed[0] for found in packed), seed
    return packed[0][1]


def fuzz(seed: int) -> list[list[Any]]:
    """Decode the message of `seed` and return the commands."""
    check_packing(seed)
    random = Random(seed)
    message = message_of(random)
    found = wire.decode_peer(message, 1 << 20, 1024)
    assert isinstance(found, wire.Batched), found
    return check(message, random.choice([0, 20, 20_000, 1 << 20]), random.choice([1, 2, 1024]))


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long to go on.")
@click.option("--seed", type=int, help="Check the message of this seed only, and show what is read.")
def main(seconds: float, seed: int | None) -> None:
    click.echo(" and ".join(implementations()))
    if seed is not None:
        click.echo(fuzz(seed))
        return
    first, until = Random().getrandbits(48), time.monotonic() + seconds  # new seeds each time
    seed, read = first, 0
    while time.monotonic() < until:
        try:
            read += sum(map(len, fuzz(seed)))
        except BaseException:
            click.echo(f"seed {seed}", err=True)
            raise
        seed += 1
    click.echo(f"{seed - first} messages, {read} commands")


if __name__ == "__main__":
    main()
