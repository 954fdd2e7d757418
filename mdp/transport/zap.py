"""Admit known keys only: answer libzmq's authentication requests (ZAP, RFC 27) in the loop of the program."""

from collections import Counter
from typing import Final

import zmq
from zmq.utils import z85

from ..errors import BindError
from ..security.access import Access
from ..wire import Message
from .multipart import receive, send
from .sockets import Context, Socket, new_socket

ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Where libzmq looks for the one ZAP handler of a context."""
DOMAIN: Final = b"zmdp"
VERSION: Final = b"1.0"
MAX_ANSWERS: Final = 100
"""Maximum number of requests answered in one turn of the loop."""

ADMITTED: Final = "admitted"
UNKNOWN_KEY: Final = "unknown-key"
WRONG_MECHANISM: Final = "wrong-mechanism"
WRONG_DOMAIN: Final = "wrong-domain"
MALFORMED: Final = "malformed"


class ZapHandler:
    """The ZAP handler of a context.

    `access` decides who is admitted; it can be replaced at any time, and applies from the next handshake on.  The user
    id of a connection is its public key in Z85: libzmq attaches it to every frame as `User-Id`.  `counts` has the
    number of handshakes that were admitted, and of those that were refused, by reason.

    Raises `BindError` if the context has a ZAP handler already.
    """

    def __init__(self, context: Context, access: Access) -> None:
        self.access = access
        self.counts: Counter[str] = Counter()
        self._socket = new_socket(context, zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(ENDPOINT)
        except zmq.ZMQError:
            self._socket.close()
            raise BindError("cannot check keys: this ZeroMQ context has a ZAP handler already; use another") from None
        self.descriptor = int(self._socket.get(zmq.FD))
        """Readable when a request may have arrived."""
        self.answer(0.0)  # libzmq signals the descriptor only after a first read has found nothing

    @property
    def refused(self) -> int:
        """How many handshakes were refused."""
        return self.counts.total() - self.counts[ADMITTED]

    def protect(self, socket: Socket) -> None:
        """Let `socket` accept only connections that this handler admits; call it before `socket` is bound."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.access.secret_key)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, admit nobody instead of everybody

    def answer(self, now: float) -> bool:
        """Answer the requests that have arrived.  Return whether there may be more."""
        for _ in range(MAX_ANSWERS):
            message = receive(self._socket)
            if message is None:
                return False
            self._answer(message, now)
        return True

    def _answer(self, message: Message, now: float) -> None:
        match message:
            case [_, b"", version, _, domain, address, _, mechanism, *credentials] if version == VERSION:
                pass
            case _:  # libzmq sends none: it is from another socket of this process, and has no place for an answer
                self._refuse(now, MALFORMED, "ignored a ZAP request that is malformed")
                return
        key = b""
        if domain != DOMAIN:
            self._refuse(now, WRONG_DOMAIN, "refused a connection from %s: its socket is not the broker's", address)
        elif mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            self._refuse(now, WRONG_MECHANISM, "refused a connection from %s: it does not use CURVE keys", address)
        else:
            key = z85.encode(credentials[0])
            if key not in self.access.keys:
                self._refuse(now, UNKNOWN_KEY, "refused a connection from %s: unknown key %s", address, key)
                key = b""
        if key:
            self.counts[ADMITTED] += 1
        status, text = (b"200", b"OK") if key else (b"400", b"not admitted")
        # A connection that has ended in the meantime gets no answer; it needs none.
        send(self._socket, [*message[:4], status, text, key, b""])

    def _refuse(self, now: float, reason: str, text: str, *values: bytes) -> None:
        """Count a refusal.  A subclass that logs it uses `text` and `values`."""
        del now, text, values
        self.counts[reason] += 1

    def close(self) -> None:
        """Stop answering."""
        self._socket.close()
