"""The machine of a connection, against the codec of a WebSocket client."""

import json

import pytest
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from zmdp.clients import Reply, RetryLater, ServiceError, ServiceNotFound
from zmdp.clients.gateways.effects import Begin, Cancel, Close
from zmdp.clients.gateways.http.problems import problem_of
from zmdp.clients.gateways.http.websocket_session import WebSocketSession
from zmdp.mdp.http.problems import Problem

MAX_HELD = 5000


class Policy:
    """Lets everything pass but the service `forbidden`."""

    def __init__(self):
        self.outstanding = []
        self.held = 0

    def begin(self, number, ask):
        if ask.service == "forbidden":
            raise Problem("not-allowed", "no", service=ask.service)
        self.outstanding.append(ask.id)
        return Begin(number, ask.service, ask.body, ask.timeout, ask.wait, ask.headers, ask.options)

    def end(self, number, ask):
        self.outstanding.remove(ask.id)

    def problem(self, number, error, ask):
        return problem_of(error, ask.service)

    def hold(self, size):
        self.held = 0
        if size > MAX_HELD:
            raise Problem("overloaded", "too much")
        self.held = size


class Pair:
    """A client's codec and the session.  Effects are returned; what is written, the client reads."""

    def __init__(self, max_size=10_000):
        self.client = ClientProtocol(parse_uri("ws://gateway/ws"))
        server = ServerProtocol(max_size=max_size)
        self.client.send_request(self.client.connect())
        server.receive_data(b"".join(self.client.data_to_send()))
        (request,) = server.events_received()
        server.send_response(server.accept(request))
        self.client.receive_data(b"".join(server.data_to_send()))
        self.client.events_received()
        self.policy = Policy()
        self.session = WebSocketSession(server, self.policy)
        self.frames = []

    def say(self, **content):
        self.client.send_text(json.dumps(content).encode())
        return self.flush()

    def flush(self):
        return self.tell(self.session.receive, b"".join(self.client.data_to_send()))

    def tell(self, method, *told):
        method(*told)
        for each in self.session.take_messages():
            self.client.receive_data(each)
        self.frames += [each for each in self.client.events_received() if isinstance(each, Frame)]
        return self.session.take_events()

    def answered(self, number, *frames, final=True):
        return self.tell(self.session.answered, number, Reply(frames, service="s", final=final))

    def heard(self):
        """Return the messages since the last call, of each error only its kind."""
        frames, self.frames = self.frames, []
        return [short(frame) for frame in frames]


def short(frame):
    if frame.opcode is not Opcode.TEXT:
        return frame.opcode.name, bytes(frame.data)
    content = json.loads(bytes(frame.data))
    if "error" in content:
        content["error"] = content["error"]["type"].partition("#")[2]
    return content


@pytest.fixture
def pair():
    return Pair()


def test_a_request_and_its_reply(pair):
    assert pair.say(id="a", service="echo", body="hi", timeout=2) == [Begin(1, "echo", [b"hi"], 2, False)]
    assert pair.heard() == []
    assert pair.answered(1, b"ho") == []
    assert pair.heard() == [{"id": "a", "final": "ho"}]
    assert pair.policy.outstanding == []


def test_partials_are_sent_only_if_they_are_wanted(pair):
    pair.say(id=1, service="s", stream=True)
    pair.say(id=2, service="s")
    for number in (1, 2):
        pair.answered(number, b"p", final=False)
        pair.answered(number, b"f")
    assert pair.heard() == [{"id": 1, "partial": "p"}, {"id": 1, "final": "f"}, {"id": 2, "final": "f"}]


def test_a_binary_request_gets_binary_replies(pair):
    pair.client.send_binary(b'{"id":1,"service":"s","stream":true}\n\x00\x01')
    assert pair.flush() == [Begin(1, "s", [b"\x00\x01"], None, False)]
    pair.answered(1, b"p", final=False)
    pair.answered(1, b"f")
    assert pair.heard() == [("BINARY", b'{"id":1,"partial":[1]}\np'), ("BINARY", b'{"id":1,"final":[1]}\nf')]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServiceNotFound("none", service="s", code=404, text="none"), "no-worker"),
        (ServiceError(404, "no such user"), "service-error"),
        (RetryLater("full", service="s", code=429, text="full"), "queue-full"),
    ],
)
def test_an_error_ends_a_request(pair, error, kind):
    pair.say(id=1, service="s")
    assert pair.tell(pair.session.answered, 1, error) == []
    assert pair.heard() == [{"id": 1, "error": kind}]
    assert pair.policy.outstanding == []


def test_what_the_policy_refuses(pair):
    assert pair.say(id=1, service="forbidden") == []
    assert pair.heard() == [{"id": 1, "error": "not-allowed"}]
    assert pair.say(id=1, service="s") == [Begin(1, "s", [b""], None, False)]


def test_a_cancelled_request_ends_with_an_error_and_its_id_is_free(pair):
    pair.say(id=1, service="s")
    assert pair.say(id=1, cancel=True) == [Cancel(1)]
    assert pair.heard() == [{"id": 1, "error": "cancelled"}]
    assert pair.answered(1, b"too late") == []
    assert pair.say(id=1, service="s") == [Begin(2, "s", [b""], None, False)]
    assert pair.heard() == []


def test_an_unknown_id_is_not_cancelled(pair):
    assert pair.say(id=1, cancel=True) == []
    assert pair.heard() == []


def test_an_id_in_use_does_not_end_the_request_that_has_it(pair):
    pair.say(id=1, service="s")
    assert pair.say(id=1, service="other") == []
    assert pair.say(id=1, service=5) == []
    assert pair.heard() == [{"id": None, "error": "invalid"}] * 2
    pair.answered(1, b"f")
    assert pair.heard() == [{"id": 1, "final": "f"}]


def test_an_invalid_message_does_not_end_the_connection(pair):
    pair.client.send_text(b"nonsense")
    pair.say(id=3, service=5)
    assert pair.heard() == [{"id": None, "error": "invalid"}, {"id": 3, "error": "invalid"}]
    assert pair.say(id=3, service="s") == [Begin(1, "s", [b""], None, False)]


def test_a_message_in_fragments(pair):
    pair.client.send_text(b'{"id":1,', fin=False)
    pair.client.send_ping(b"between")
    pair.client.send_continuation(b"", fin=False)
    pair.client.send_continuation(b'"service":"s"}', fin=True)
    assert pair.flush() == [Begin(1, "s", [b""], None, False)]
    assert pair.heard() == [("PONG", b"between")]


def test_what_is_held_of_an_incomplete_message_is_counted(pair):
    pair.client.send_text(b'{"id":1,', fin=False)
    pair.flush()
    assert pair.policy.held == 8
    pair.client.send_continuation(b'"service":"s"}', fin=True)
    data = b"".join(pair.client.data_to_send())
    pair.session.receive(data[:-1])
    assert pair.policy.held == 8 + len(data) - 1
    pair.client.send_ping(b"")
    pair.session.receive(data[-1:] + b"".join(pair.client.data_to_send()))
    assert pair.policy.held == 0


def test_a_message_for_which_there_is_no_memory_ends_the_connection(pair):
    pair.say(id=1, service="s")
    pair.client.send_text(b" " * 6000, fin=False)
    assert pair.flush() == [Cancel(1), Close("too much")]
    assert pair.client.close_rcvd.code == CloseCode.TRY_AGAIN_LATER
    assert pair.policy.held == 0


def test_a_connection_that_is_lost_holds_nothing(pair):
    pair.client.send_text(b"{", fin=False)
    pair.flush()
    assert pair.policy.held == 1
    pair.session.ended()
    assert pair.policy.held == 0


def test_every_way_to_split_the_bytes(pair):
    pair.client.send_text(b'{"id":1,"service":"s"}')
    data = b"".join(pair.client.data_to_send())
    effects = [each for byte in data for each in pair.tell(pair.session.receive, bytes([byte]))]
    assert effects == [Begin(1, "s", [b""], None, False)]


def test_a_message_that_is_too_large_ends_the_connection():
    pair = Pair(max_size=100)
    pair.say(id=1, service="s")
    (cancel, close) = pair.say(id=2, service="s", body="x" * 200)
    assert cancel == Cancel(1)
    assert isinstance(close, Close)
    assert close.why
    assert pair.client.close_rcvd.code == CloseCode.MESSAGE_TOO_BIG
    assert pair.policy.outstanding == []


def test_fragments_that_are_too_large_together_end_the_connection():
    pair = Pair(max_size=100)
    pair.client.send_text(b" " * 60, fin=False)
    assert pair.flush() == []
    pair.client.send_continuation(b" " * 60, fin=False)
    assert [type(each) for each in pair.flush()] == [Close]


def test_frames_that_break_the_protocol_end_the_connection(pair):
    pair.say(id=1, service="s")
    cancel, close = pair.tell(pair.session.receive, b"\x81\x00")  # a client must mask its frames
    assert cancel == Cancel(1)
    assert isinstance(close, Close)
    assert pair.client.close_rcvd.code == CloseCode.PROTOCOL_ERROR


def test_text_that_is_not_utf8_ends_the_connection(pair):
    pair.say(id=1, service="s")
    pair.client.send_text(b"\xff")
    assert pair.flush() == [Cancel(1), Close("a message is not UTF-8")]
    assert pair.client.close_rcvd.code == CloseCode.INVALID_DATA


def test_a_close_cancels_everything_and_is_answered(pair):
    pair.say(id=1, service="s")
    pair.say(id=2, service="s")
    pair.client.send_close(CloseCode.NORMAL_CLOSURE)
    assert pair.flush() == [Cancel(1), Cancel(2), Close("")]
    assert pair.client.close_rcvd.code == CloseCode.NORMAL_CLOSURE
    assert pair.policy.outstanding == []
    assert pair.answered(1, b"too late") == []


def test_a_close_in_the_same_bytes_as_messages(pair):
    """Replies to them can no longer be sent."""
    pair.client.send_text(b"nonsense")
    pair.client.send_text(b'{"id":1,"service":"s"}')
    pair.client.send_close(CloseCode.NORMAL_CLOSURE)
    assert pair.flush() == [Begin(1, "s", [b""], None, False), Cancel(1), Close("")]
    assert [kind for kind, _ in pair.heard()] == ["CLOSE"]


def test_a_lost_connection_ends_everything(pair):
    pair.say(id=1, service="s")
    assert pair.tell(pair.session.ended) == [Cancel(1), Close("")]
    assert pair.policy.outstanding == []
    assert pair.session.outstanding == 0
    assert pair.answered(1, b"too late") == []


def test_draining_refuses_new_requests_and_closes_after_the_last(pair):
    pair.say(id=1, service="s")
    pair.say(id=2, service="s")
    assert pair.tell(pair.session.drain) == []
    assert pair.say(id=3, service="s") == []
    assert pair.heard() == [{"id": 3, "error": "closing"}]
    assert pair.answered(1, b"f") == []
    assert pair.say(id=2, cancel=True) == [Cancel(2), Close("")]
    assert pair.client.close_rcvd.code == CloseCode.GOING_AWAY


def test_draining_closes_an_idle_connection_at_once(pair):
    assert pair.tell(pair.session.drain) == [Close("")]
    assert pair.client.close_rcvd.code == CloseCode.GOING_AWAY
    assert pair.tell(pair.session.drain) == []


def test_a_ping_and_a_close_for_a_reason(pair):
    assert pair.tell(pair.session.ping) == []
    assert pair.heard() == [("PING", b"")]
    assert pair.tell(pair.session.close, CloseCode.INTERNAL_ERROR, "ä" * 100) == [Close("ä" * 100)]
    assert pair.client.close_rcvd.code == CloseCode.INTERNAL_ERROR
    assert pair.tell(pair.session.ping) == []
    assert pair.tell(pair.session.close, CloseCode.INTERNAL_ERROR, "again") == []
    assert pair.heard() == [("CLOSE", b"\x03\xf3" + "ä".encode() * 61)]
