"""X1's messages, each of which carries many commands (docs/x1.md).

A message is `MDPCX1|MDPWX1 09 records [attachment…]`, or a bare header, which is a HEARTBEAT.  All integers are
big-endian:

    record := u32 size, u8 command, u64 id, …      size: of what follows it; id: a client's number, a worker's address
    REQUEST of a client   u32 ttl_ms, u8+service, u16+options, body
    REQUEST to a worker   u32 ttl_ms, u8 attempt, u16+options, body
    PARTIAL, FINAL        body
    ERROR                 u16 code, u16+text, body (at most one frame: the detail)
    READY                 u32 credit, u8+service, u16+options (the id is 0)
    CREDIT                u32 credit (the id is 0)
    LIMITS to a client    u64 max_bytes, u32 max_frames (the id is 0)
    CANCEL, RELEASE       nothing, as in LIMITS of a client
    DISCONNECT            text, to the end of the record (the id is 0)
    body   := u16 n, n × (u32 length, bytes); length FFFFFFFF: the frame is the next attachment (`SHARED` bytes or more)

A ttl of 0 means that there is none.  `x1` has the numbers of the commands.  `wire.heartbeat`, `wire.disconnect` and
`wire.limits` encode HEARTBEAT, DISCONNECT and the broker's LIMITS, which are messages of their own.

There are two implementations, which write the same bytes and read the same commands: `batch_cython`, if it was
compiled, and `batch_python`.

    Batch(route, header)            commands for one peer, packed as they are added
      .request_to_broker(number, ttl, service, options, body)      ttl in milliseconds, 0 for none
      .request_to_worker(address, ttl, attempt, options, body)     an attempt above 255 is sent as 255
      .reply(command, id, body)                          PARTIAL or FINAL, by its byte in that direction
      .error(command, id, code, text, detail)            ERROR; the text is cut at 65,535 bytes
      .signal(command, id)                               CANCEL, RELEASE, or LIMITS of a client
      .ready(credit, service, options)  .credit(credit)  READY, CREDIT
      .messages()                                        return everything added, as messages to send; start again
      len(batch)                                         0 if nothing was added since

    from_client(message, at, route, max_body, max_frames)    Request, Cancel, Limits, Invalid
    from_worker(message, at, route, max_body, max_frames)    Ready, Reply, Error, Oversized, Credit, Release,
                                                             Disconnect, Invalid
    to_client(message, at)                                   Reply, Error, Disconnect, Limits, Invalid
    to_worker(message, at)                                   Request, Cancel, Disconnect, Invalid

A method of `Batch` raises, and adds nothing, if a record cannot hold what is given: options of more than
`wire.MAX_OPTIONS` bytes, a body of more than `MAX_BODY_FRAMES` frames, or a ttl above `MAX_TTL_MS`.

`at` is the index of the header.  An invalid record does not affect the others, unless it is unknown where the next one
begins or which attachment is next (C43).
"""

from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from ...pure import PURE
from . import batch_python
from .batch_python import MAX_BODY_FRAMES, MAX_RECORDS, MAX_RECORDS_BYTES, MAX_TTL_MS

__all__ = [
    "COMPILED", "MAX_BODY_FRAMES", "MAX_RECORDS", "MAX_RECORDS_BYTES", "MAX_TTL_MS", "Batch", "from_client",
    "from_worker", "to_client", "to_worker",
]  # fmt: skip

_compiled: Any = None
if not PURE:
    with suppress(ModuleNotFoundError):  # not built
        _compiled = import_module(".batch_cython", __package__)

COMPILED: Final = _compiled is not None
"""Whether the compiled implementation is in use."""

Batch: Any = batch_python.Batch
from_client: Any = batch_python.from_client
from_worker: Any = batch_python.from_worker
to_client: Any = batch_python.to_client
to_worker: Any = batch_python.to_worker
if COMPILED:
    Batch = _compiled.Batch
    from_client = _compiled.from_client
    from_worker = _compiled.from_worker
    to_client = _compiled.to_client
    to_worker = _compiled.to_worker
