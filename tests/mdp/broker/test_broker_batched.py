"""The broker's machine with peers that speak the batched form of X1: many commands in a message, one for each peer."""

import json
import struct

import pytest

from zmdp.mdp import wire
from zmdp.mdp.broker.drops import Drop
from zmdp.mdp.broker.journal import Loss, Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import CX1, WX1, batch
from zmdp.mdp.wire.batch import Batch

W, V = (b"w", b""), (b"v", b"")
C, D = (b"c", b""), (b"d", b"")
PARTIAL_OF_WORKER, FINAL_OF_WORKER, ERROR_OF_WORKER, RELEASE, CANCEL = 3, 4, 7, 11, 5


# ── what peers send ──────────────────────────────────────────────────────────────────────────────────────────────────


def packed(route, header, *records):
    """One message of `records`, each the name of a method of `Batch` and its arguments."""
    open_batch = Batch(route, header)
    for name, *arguments in records:
        getattr(open_batch, name)(*arguments)
    (message,) = open_batch.messages()
    return message


def client(*records, route=C):
    return packed(route, CX1, *records)


def worker(*records, route=W):
    return packed(route, WX1, *records)


def request(number, body=b"x", *, ttl=0, service=b"echo", options=b""):
    return "request_to_broker", number, ttl, service, options, [body]


def cancel(number):
    return "signal", CANCEL, number


def ready(credit=10, service=b"echo", **options):
    return "ready", credit, service, json.dumps(options).encode() if options else b""


def final(address, *body):
    return "reply", FINAL_OF_WORKER, address, body or [b"x"]


def partial(address, *body):
    return "reply", PARTIAL_OF_WORKER, address, body or [b"x"]


def failure(address, code=500, text=b"it broke", *detail):
    return "error", ERROR_OF_WORKER, address, code, text, detail


def release(address):
    return "signal", RELEASE, address


def credit(value):
    return "credit", value


DISCONNECT, HEARTBEAT = [*W, WX1, b"\x06"], [*W, WX1]

# ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────────


def read(message):
    """What the broker sent: whom to, and its commands as short tuples, or the frames of a framed message."""
    at = next(at for at, frame in enumerate(message) if frame in {CX1, WX1})
    if message[at + 1 : at + 2] != [wire.BATCH]:
        return message[0], message[at + 1 :]
    commands = batch.to_client(message, at) if message[at] == CX1 else batch.to_worker(message, at)
    return message[0], [short(command) for command in commands]


def short(command):
    match command:
        case wire.Request():
            options = (command.ttl, command.attempt, command.options.raw)
            plain = options == (None, 1, b"")
            return "REQUEST", command.id, command.body[0], *([] if plain else [options])
        case wire.Cancel():
            return "CANCEL", command.id
        case wire.Reply():
            return "FINAL" if command.final else "PARTIAL", command.id, command.body[0]
        case wire.Error():
            return "ERROR", command.id, command.code, *command.detail


def told(sent):
    """What each peer was sent, in one message each; those that are sent first come first."""
    messages = [read(message) for message in sent]
    assert len({peer for peer, _ in messages}) == len(messages)
    return dict(messages)


def broker_with(*workers, **limits):
    """A broker at time 0 whose dispatches have the addresses 1, 2, 3 …; `workers` are (route, credit)."""
    broker = Broker(Limits(**limits), now=0, first_address=1)
    for route, value in workers:
        assert broker.receive(worker(ready(value), route=route), 0) == []
    return broker


def turn(broker, *messages, now=0):
    """What the broker sends for `messages` that arrive in one turn."""
    for message in messages:
        broker.take(message, now)
    return broker.flush(now)


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_requests_and_their_replies():
    broker = broker_with((W, 3))
    sent = broker.receive(client(request(7, b"a"), request(8, b"b"), request(9, b"c")), 0)
    assert told(sent) == {b"w": [("REQUEST", 1, b"a"), ("REQUEST", 2, b"b"), ("REQUEST", 3, b"c")]}
    sent = broker.receive(worker(final(2, b"B"), partial(1, b"A"), failure(3, 422), final(1, b"end")), 0)
    assert told(sent) == {
        b"c": [("FINAL", 8, b"B"), ("PARTIAL", 7, b"A"), ("ERROR", 9, 422), ("FINAL", 7, b"end")],
    }  # fmt: skip
    assert (broker.registry.clients, broker.registry.running) == ({}, 0)


def test_messages_have_the_layout_of_the_specification():
    broker = broker_with((W, 1))
    records = struct.pack(">IBQIBHHI1s", 23, 2, 1, 0, 1, 0, 1, 1, b"x")
    assert broker.receive(client(request(7)), 0) == [[b"w", b"", b"MDPWX1", b"\x09", records]]
    records = struct.pack(">IBQHI1s", 16, 3, 7, 1, 1, b"x")
    assert broker.receive(worker(final(1)), 0) == [[b"c", b"", b"MDPCX1", b"\x09", records]]


def test_each_peer_gets_one_message_of_all_that_happened_in_a_turn():
    broker = broker_with((W, 2), (V, 2))
    sent = turn(broker, client(request(1), request(2)), client(request(1, b"y"), request(2, b"z"), route=D))
    assert told(sent) == {
        b"w": [("REQUEST", 1, b"x"), ("REQUEST", 3, b"y")],
        b"v": [("REQUEST", 2, b"x"), ("REQUEST", 4, b"z")],
    }
    sent = turn(broker, worker(final(1), final(3), route=W), worker(final(4), final(2), route=V))
    assert told(sent) == {
        b"c": [("FINAL", 1, b"x"), ("FINAL", 2, b"x")],
        b"d": [("FINAL", 1, b"x"), ("FINAL", 2, b"x")],
    }


def test_clients_take_turns_within_a_turn():  # C20
    broker = broker_with((W, 3))
    hog = client(*[request(n, b"h%d" % n) for n in range(100)])
    sent = turn(broker, hog, client(request(1, b"c"), route=D))
    assert told(sent) == {b"w": [("REQUEST", 1, b"h0"), ("REQUEST", 2, b"c"), ("REQUEST", 3, b"h1")]}


def test_credit_and_release():
    broker = broker_with((W, 1), (V, 3))
    assert told(broker.receive(client(*map(request, range(1, 6))), 0)) == {
        b"w": [("REQUEST", 1, b"x")], b"v": [("REQUEST", 2, b"x"), ("REQUEST", 3, b"x"), ("REQUEST", 4, b"x")],
    }  # fmt: skip
    sent = broker.receive(worker(credit(1), release(4), release(3), route=V), 0)
    assert sent == []
    assert told(broker.receive(worker(credit(3)), 0)) == {b"w": [("REQUEST", 5, b"x"), ("REQUEST", 6, b"x")]}
    assert broker.registry.queued == 1


def test_a_cancel_reaches_the_worker():
    broker = broker_with((W, 3))
    broker.receive(client(request(1), request(2)), 0)
    assert told(broker.receive(client(cancel(2), request(3)), 0)) == {
        b"c": [("ERROR", 2, 499)], b"w": [("CANCEL", 2), ("REQUEST", 3, b"x")],
    }  # fmt: skip
    assert broker.receive(worker(failure(2, 499)), 0) == []
    assert broker.registry.running == 2


def test_a_request_and_its_cancel_in_one_message():
    broker = broker_with((W, 3))
    sent = broker.receive(client(request(1), cancel(1), request(1, b"again")), 0)
    assert told(sent) == {b"c": [("ERROR", 1, 499)], b"w": [("REQUEST", 1, b"again")]}


def test_what_is_refused_is_told_beside_the_replies():
    broker = broker_with((W, 1), max_queue=1)
    sent = broker.receive(client(*map(request, range(1, 5))), 0)
    assert told(sent) == {b"c": [("ERROR", 3, 429), ("ERROR", 4, 429)], b"w": [("REQUEST", 1, b"x")]}


def test_mmi_is_answered_in_the_batch():  # C25
    broker = broker_with((W, 1))
    sent = broker.receive(client(request(1, b"echo", service=b"mmi.service"), request(2)), 0)
    assert told(sent) == {b"c": [("FINAL", 1, b"200")], b"w": [("REQUEST", 1, b"x")]}
    assert broker.receive(client(cancel(1)), 0) == []  # it crossed the end


def test_a_ttl_is_told_beside_the_options():
    broker = broker_with(heartbeat=10)
    broker.receive(client(request(1, ttl=5000), request(2, options=b'{"ttl":4000,"key":1}')), 0)
    sent = broker.receive(worker(ready(2)), 1.5)
    assert told(sent) == {
        b"w": [("REQUEST", 1, b"x", (3.5, 1, b"")), ("REQUEST", 2, b"x", (2.5, 1, b'{"key":1}'))],
    }  # fmt: skip
    assert told(broker.tick(4.02)) == {b"c": [("ERROR", 2, 408)], b"w": [("CANCEL", 2)]}


def test_the_attempt_is_told_beside_the_options():  # C17
    broker = broker_with((W, 1), (V, 1))
    broker.receive(client(request(1, options=b'{"key":1}')), 0)
    assert told(broker.gone(b"w", 0)) == {b"v": [("REQUEST", 2, b"x", (None, 2, b'{"key":1}'))]}


def test_a_record_tells_of_at_most_255_attempts():
    broker = broker_with(max_attempts=1000)
    broker.receive(client(request(1)), 0)
    for number in range(1, 300):
        (message,) = broker.receive(worker(ready(1), route=(b"w%d" % number, b"")), 0)
        (command,) = batch.to_worker(message, 2)
        assert command.attempt == min(number, 255)
        broker.gone(message[0], 0)


def test_a_ttl_that_a_record_cannot_tell_is_among_the_options():
    broker = broker_with((W, 1))
    sent = broker.receive([*C[:1], b"1", b"", CX1, b"\x01", b"echo", b'{"ttl":5000000000,"key":1}', b"x"], 0)
    assert told(sent) == {b"w": [("REQUEST", 1, b"x", (None, 1, b'{"ttl":5000000000,"key":1}'))]}


def test_options_that_a_record_cannot_hold_are_framed():
    """Written anew, they may be longer than they came."""
    broker = broker_with((W, 2))
    options = json.dumps({"ttl": 5000, "key": "ä" * 30_000}, ensure_ascii=False).encode()
    framed = [b"c", b"1", b"", CX1, b"\x01", b"echo", options, b"x"]
    sent = turn(broker, client(request(1)), [b"d", *framed[1:]])
    assert [message[3:4] for message in sent] == [[b"\x09"], [b"\x02"]]
    command = wire.decode_broker(sent[1][1:])
    assert (command.id, command.options.values()) == (2, json.loads(options))
    assert told(broker.receive(worker(final(1)), 0)) == {b"c": [("FINAL", 1, b"x")]}


def test_bodies_that_a_record_cannot_hold_are_framed_in_their_order():
    many = [b""] * 65_536
    broker = broker_with((W, 2), max_frames=100_000)
    broker.receive(client(request(1), request(2)), 0)
    framed = [*W, WX1, b"\x03", b"1", b"", *many]
    sent = turn(broker, worker(partial(1)), framed, worker(final(1), final(2)))
    assert [message[:5] for message in sent] == [
        [*C, CX1, b"\x09", sent[0][4]], [b"c", b"1", b"", CX1, b"\x02"], [*C, CX1, b"\x09", sent[2][4]],
    ]  # fmt: skip
    assert read(sent[0])[1] == [("PARTIAL", 1, b"x")]
    assert read(sent[2])[1] == [("FINAL", 1, b"x"), ("FINAL", 2, b"x")]
    broker.receive(worker(credit(2)), 0)
    ((*head, _body),) = [message[:7] for message in broker.receive([b"d", b"", b"MDPC01", b"echo", *many], 0)]
    assert head == [*W, WX1, b"\x02", b"3", b""]


def test_a_large_frame_is_passed_on_as_an_attachment():
    large = memoryview(b"L" * wire.SHARED)
    broker = broker_with((W, 2))
    (message,) = broker.receive(client(request(1, large), request(2)), 0)
    assert message[5] is large
    (message,) = broker.receive(worker(final(2), final(1, b"small", large)), 0)
    assert message[5] is large
    assert read(message)[1] == [("FINAL", 2, b"x"), ("FINAL", 1, b"small")]


def test_what_one_message_cannot_hold_goes_in_several():
    broker = broker_with((W, 1000))
    sent = turn(broker, *[client(*[request(n + 100 * m) for n in range(100)]) for m in range(3)])
    assert [len(read(message)[1]) for message in sent] == [256, 44]


# ── heartbeats and the end ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("route", [(b"c",), (b"c", b""), (b"c", b"hop", b"")], ids=len)
def test_a_clients_heartbeat_is_echoed(route):
    broker = broker_with()
    assert broker.receive([*route, CX1], 0) == [[*route, CX1]]
    assert broker.stats.heartbeats == 1


def test_a_workers_heartbeats():  # C13
    broker = broker_with((W, 1), heartbeat=1, liveness=3)
    assert broker.tick(1.06) == [HEARTBEAT]
    assert broker.receive(HEARTBEAT, 2) == []
    broker.tick(4.9)
    assert len(broker.registry.workers) == 1
    broker.tick(5.06)
    assert broker.stats.lost == {Loss.SILENT: 1}
    assert broker.receive(HEARTBEAT, 6) == [DISCONNECT]  # C14


def test_a_heartbeat_and_the_records_of_a_tick():
    broker = broker_with((W, 2), (V, 1), heartbeat=1, liveness=3)
    broker.receive(client(request(1, ttl=1050), request(2)), 0)
    broker.receive([*V, WX1], 2)
    broker.receive(HEARTBEAT, 2)
    assert broker.tick(2.9)[-1][:3] == [b"w", b"", WX1]
    sent = broker.receive(client(request(3)), 3)
    assert told(sent) == {b"w": [("REQUEST", 3, b"x")]}


def test_a_worker_says_hello_and_who_it_is():
    broker = broker_with()
    broker.receive(worker(ready(64, name="resize", host="box", pid=17, version="1.0")), 0)
    there = broker.registry.workers[b"w"]
    assert (there.credit, there.name, there.host, there.pid, there.version) == (64, "resize", "box", 17, "1.0")
    assert str(there) == "1 (resize, on box, pid 17)"


def test_disconnect_is_framed_and_comes_last():
    broker = broker_with((W, 2))
    broker.receive(client(request(1), request(2)), 0)
    sent = turn(broker, client(cancel(1)), DISCONNECT, worker(final(2), failure(1, 499)))
    assert [read(message) for message in sent] == [
        (b"c", [("ERROR", 1, 499), ("FINAL", 2, b"x")]), (b"w", [("CANCEL", 1)]), (b"w", [b"\x06"]),
    ]  # fmt: skip
    assert broker.registry.workers == {}


def test_disconnect_is_no_change_of_the_form():
    broker = broker_with((W, 1), heartbeat=1)
    broker.receive(client(request(1)), 0)
    broker.receive(DISCONNECT, 0.5)
    assert broker.tick(1.06) == [HEARTBEAT]


def test_what_is_unexpected_disconnects_after_what_was_said():  # C14
    broker = broker_with((W, 2))
    broker.receive(client(request(1), request(2)), 0)
    sent = turn(broker, client(cancel(1)), worker(final(999)))
    assert [read(message) for message in sent] == [
        (b"c", [("ERROR", 1, 499)]), (b"w", [("CANCEL", 1)]), (b"w", [b"\x06"]),
    ]  # fmt: skip
    assert broker.stats.disconnected == {Refusal.WRONG_CLIENT: 1}


def test_the_end_of_the_broker():
    broker = broker_with((W, 1))
    broker.receive(client(request(1), request(2)), 0)
    sent = [read(message) for message in broker.close(1)]
    assert sent == [(b"c", [("ERROR", 1, 503), ("ERROR", 2, 503)]), (b"w", [("CANCEL", 1)]), (b"w", [b"\x06"])]


@pytest.mark.parametrize("records", [[ready()], [ready(), ready()]], ids=len)
def test_a_second_ready(records):  # C14
    broker = broker_with((W, 1))
    sent = broker.receive(worker(*records), 0)
    assert sent == [DISCONNECT]
    assert broker.registry.workers == {}  # what follows in the same message is not read


# ── late and duplicated ──────────────────────────────────────────────────────────────────────────────────────────────


def test_duplicated_replies_match_nothing():  # C32
    broker = broker_with((W, 2))
    broker.receive(client(request(1), request(2)), 0)
    sent = broker.receive(worker(final(1, b"1"), final(1, b"1"), failure(1), release(1), final(2, b"2")), 0)
    assert told(sent) == {b"c": [("FINAL", 1, b"1"), ("FINAL", 2, b"2")]}
    assert broker.stats.late == 3
    assert broker.stats.disconnected == {}


# ── a client's number ────────────────────────────────────────────────────────────────────────────────────────────────


def framed_request(number, service=b"echo"):
    return [b"c", number, b"", CX1, b"\x01", service, b"", b"x"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_number_is_the_same_in_both_forms(order):
    broker = broker_with((W, 5))
    first, second = [client(request(17)), framed_request(b"17")][::order]
    broker.receive(first, 0)
    ((peer, what),) = [read(message) for message in broker.receive(second, 0)]
    assert (peer, what) == (
        b"c",
        [b"\x04", b"echo", b"400", b"malformed: number-in-use"] if order == 1 else [("ERROR", 17, 400)],
    )
    assert broker.stats.invalid == {"number-in-use": 1}
    assert len(broker.receive(framed_request(b"017"), 0)) == 1  # this is another
    assert sorted(map(str, (each.number for each in broker.registry.numbered))) == ["17", "b'017'"]


def test_a_cancel_in_the_other_form():
    broker = broker_with()
    broker.receive(client(request(17)), 0)
    assert [read(m) for m in broker.receive([b"c", b"17", b"", CX1, b"\x05", b"echo"], 0)] == [
        (b"c", [b"\x04", b"echo", b"499", b"cancelled"])
    ]
    broker.receive(framed_request(b"18"), 0)
    assert told(broker.receive(client(cancel(18)), 0)) == {b"c": [("ERROR", 18, 499)]}


def test_a_number_that_no_record_can_tell_is_answered_framed():
    broker = broker_with((W, 3))
    broker.receive(framed_request(b"017"), 0)
    broker.receive(client(request(1)), 0)
    sent = broker.receive(worker(final(1), final(2)), 0)
    assert sent[0] == [b"c", b"017", b"", CX1, b"\x03", b"echo", b"x"]
    assert read(sent[1]) == (b"c", [("FINAL", 1, b"x")])
    assert [read(m) for m in broker.receive([b"c", b"x", b"", CX1, b"\x05", b"echo"], 0)] == [
        (b"c", [b"\x04", b"echo", b"400", b"malformed: unknown-number"])
    ]


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_any_integer_is_a_number(number):
    broker = broker_with((W, 1))
    broker.receive(client(request(number)), 0)
    assert told(broker.receive(worker(final(1)), 0)) == {b"c": [("FINAL", number, b"x")]}


# ── the form changes ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_is_answered_in_the_form_in_which_it_spoke_last():
    broker = broker_with((W, 9))
    broker.receive(client(request(1), request(2), request(3)), 0)
    assert told(broker.receive(worker(final(1)), 0)) == {b"c": [("FINAL", 1, b"x")]}
    broker.receive(framed_request(b"4"), 0)
    assert broker.receive(worker(final(2)), 0) == [[b"c", b"2", b"", CX1, b"\x03", b"echo", b"x"]]
    broker.receive(client(request(5)), 0)
    assert told(broker.receive(worker(final(4), final(3)), 0)) == {b"c": [("FINAL", 4, b"x"), ("FINAL", 3, b"x")]}


def test_a_client_changes_its_form_in_the_middle_of_a_turn():
    broker = broker_with((W, 9))
    broker.receive(client(*map(request, range(1, 5))), 0)
    sent = turn(
        broker,
        worker(partial(1), partial(2)),
        framed_request(b"5"),
        worker(final(1)),
        client(request(6)),
        worker(final(2)),
    )
    assert [read(message) for message in sent] == [
        (b"c", [("PARTIAL", 1, b"x"), ("PARTIAL", 2, b"x")]),
        (b"c", [b"\x03", b"echo", b"x"]),
        (b"c", [("FINAL", 2, b"x")]),
        (b"w", [("REQUEST", 5, b"x"), ("REQUEST", 6, b"x")]),
    ]


def framed(*frames):
    return [*W, WX1, *frames]


def test_a_worker_is_spoken_to_in_the_form_in_which_it_spoke_last():
    broker = broker_with((W, 9), heartbeat=1)
    assert told(broker.receive(client(request(1)), 0)) == {b"w": [("REQUEST", 1, b"x")]}
    broker.receive(framed(b"\x05"), 0)
    assert broker.receive(client(request(2)), 0) == [framed(b"\x02", b"2", b"", b"", b"x")]
    assert read(broker.receive(client(cancel(2)), 0)[1]) == (b"w", [b"\x08", b"2", b""])
    assert broker.tick(1.06) == [framed(b"\x05")]
    broker.receive(HEARTBEAT, 1.1)
    assert told(broker.receive(client(request(3)), 1.2)) == {b"w": [("REQUEST", 3, b"x")]}
    assert broker.tick(2.3) == [HEARTBEAT]


def test_a_worker_changes_its_form_in_the_middle_of_a_turn():
    broker = broker_with((W, 9))
    broker.receive(client(request(1), request(2)), 0)
    sent = turn(broker, client(cancel(1)), framed(b"\x05"), client(cancel(2)), worker(final(1)), client(request(3)))
    assert [read(message) for message in sent] == [
        (b"c", [("ERROR", 1, 499), ("ERROR", 2, 499)]),
        (b"w", [("CANCEL", 1)]),
        (b"w", [b"\x08", b"2", b""]),
        (b"w", [("REQUEST", 3, b"x")]),
    ]


def test_a_framed_worker_is_told_of_a_ttl_that_came_beside_the_options():
    broker = broker_with(heartbeat=10)
    broker.receive([b"w", WX1, b"\x01", b"echo", b'{"credit":3}'], 0)
    sent = broker.receive(client(request(1, ttl=5000), request(2, ttl=5000, options=b'{"key":1}')), 0)
    assert [message[5] for message in sent] == [b'{"ttl":5000}', b'{"ttl":5000,"key":1}']


def test_peers_of_all_dialects_and_forms_at_once():
    broker = broker_with((W, 1))
    for ready_ in ([b"old", b"MDPW02", b"\x01", b"echo"], [b"framed", WX1, b"\x01", b"echo"]):
        broker.receive(ready_, 0)
    sent = turn(broker, [b"o", b"MDPC02", b"\x01", b"echo", b"x"], framed_request(b"1"), client(request(1), route=D))
    assert [message[0] for message in sent] == [b"w", b"old", b"framed"]
    sent = turn(
        broker,
        worker(final(1)),
        [b"old", b"MDPW02", b"\x04", b"2", b"", b"x"],
        [b"framed", WX1, b"\x04", b"3", b"", b"x"],
    )
    assert sent[:2] == [[b"o", b"MDPC02", b"\x03", b"echo", b"x"], [b"c", b"1", b"", CX1, b"\x03", b"echo", b"x"]]
    assert read(sent[2]) == (b"d", [("FINAL", 1, b"x")])


# ── behind a proxy ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_peers_behind_a_proxy():  # C36
    one, two = (b"p", b"1", b""), (b"p", b"2", b"")
    broker = broker_with((one, 1), (two, 1))
    sent = broker.receive(client(request(1), request(2), route=(b"p", b"c", b"")), 0)
    assert [message[:4] for message in sent] == [[*one, WX1], [*two, WX1]]
    sent = turn(broker, worker(final(2), route=two), worker(final(1), route=one))
    assert [message[:4] for message in sent] == [[b"p", b"c", b"", CX1]]
    assert [short(command) for command in batch.to_client(sent[0], 3)] == [("FINAL", 2, b"x"), ("FINAL", 1, b"x")]
    assert broker.probe(b"p", 0) == [[*one, WX1], [*two, WX1]]


def test_a_number_behind_a_proxy_is_the_same_in_both_forms():  # C36
    broker = broker_with()
    route = (b"p", b"c", b"")
    broker.receive(client(request(1), route=route), 0)
    sent = broker.receive([b"p", b"c", b"1", b"", CX1, b"\x05", b"echo"], 0)
    assert sent == [[b"p", b"c", b"1", b"", CX1, b"\x04", b"echo", b"499", b"cancelled"]]


def test_a_probe_is_a_bare_header():
    broker = broker_with((W, 1))
    broker.receive(client(request(1)), 0)
    assert broker.probe(b"w", 0) == [HEARTBEAT]
    assert broker.probe(b"c", 0) == [[*C, CX1]]


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_wrong_with_one_record_does_not_touch_the_others():  # C43
    broker = broker_with((W, 5))
    sent = broker.receive(client(request(1), request(2, service=b"\n"), request(3, options=b"["), request(4)), 0)
    assert told(sent) == {
        b"c": [("ERROR", 2, 400), ("ERROR", 3, 400)], b"w": [("REQUEST", 1, b"x"), ("REQUEST", 2, b"x")],
    }  # fmt: skip
    assert broker.stats.invalid == {"bad-service-name": 1, "bad-options": 1}


def test_a_request_over_the_limits():
    broker = broker_with((W, 5), max_message=1000)
    sent = broker.receive(client(request(1), request(2, b"x" * 1001)), 0)
    assert told(sent) == {b"c": [("ERROR", 2, 413)], b"w": [("REQUEST", 1, b"x")]}
    assert broker.stats.invalid == {"too-large": 1}


def test_replies_over_the_limits():  # C15
    broker = broker_with((W, 5), max_message=1000)
    broker.receive(client(*map(request, range(1, 5))), 0)
    large = b"x" * 1001
    sent = broker.receive(
        worker(final(1, large), partial(2, large), failure(3, 500, b"text", large), final(4), final(2)), 0
    )
    assert told(sent) == {
        b"c": [("ERROR", 1, 413), ("ERROR", 2, 413), ("ERROR", 3, 413), ("FINAL", 4, b"x")], b"w": [("CANCEL", 2)],
    }  # fmt: skip
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 3}
    assert broker.registry.running == 0


@pytest.mark.parametrize(
    "message",
    [
        [*W, WX1, b"\x09", b"\xff" * 40],
        [*W, WX1, b"\x09", struct.pack(">IBQ", 9, 99, 1)],
        [*W, WX1, b"\x09", struct.pack(">IBQ", 9, FINAL_OF_WORKER, 1)],
        [*W, WX1, b"\x09"],
        [*W, WX1, b"\x09", b""],
        [*C, CX1, b"\x09", b"", b"attachment"],
    ],
)
def test_records_that_cannot_be_read_change_nothing(message):  # C43
    broker = broker_with((W, 1))
    broker.receive(client(request(1), request(2)), 0)
    assert broker.receive(message, 0) == []
    assert told(broker.receive(worker(final(1)), 0)) == {b"c": [("FINAL", 1, b"x")], b"w": [("REQUEST", 2, b"x")]}


def test_records_that_cannot_be_read_are_a_sign_of_life():  # C13
    broker = broker_with((W, 1), heartbeat=1, liveness=3)
    assert broker.receive([*W, WX1, b"\x09", b"?"], 2) == []
    broker.tick(4.9)
    assert list(broker.registry.workers) == [b"w"]


def test_records_of_a_stranger_that_cannot_be_read_are_not_answered():  # C15
    broker = broker_with()
    assert broker.receive([*W, WX1, b"\x09", b"?"], 0) == []
    assert (broker.stats.invalid, broker.stats.disconnected) == ({"bad-record": 1}, {})


def test_one_disconnect_answers_all_records_of_a_message():  # C14
    broker = broker_with((W, 2))
    broker.receive(client(request(1), request(2)), 0)
    sent = broker.receive(worker(final(1), final(999), final(2), credit(5), ready(9)), 0)
    assert [read(message) for message in sent] == [(b"c", [("FINAL", 1, b"x")]), (b"w", [b"\x06"])]
    assert broker.stats.disconnected == {Refusal.WRONG_CLIENT: 1}
    assert (broker.registry.workers, broker.registry.queued) == ({}, 1)


def test_records_of_a_stranger():  # C14
    broker = broker_with()
    assert broker.receive(worker(credit(1)), 0) == [DISCONNECT]
    assert broker.stats.disconnected == {Refusal.NOT_REGISTERED: 1}


def test_records_from_a_worker_of_another_dialect():  # C14
    broker = broker_with()
    broker.receive([b"w", b"MDPW02", b"\x01", b"echo"], 0)
    assert broker.receive(worker(credit(1)), 0) == [DISCONNECT]
    assert broker.stats.disconnected == {Refusal.WRONG_DIALECT: 1}


def test_a_client_that_did_not_keep_up_hears_nothing_more():
    broker = broker_with((W, 1))
    broker.receive(client(request(1)), 0)
    assert told(broker.gone(b"c", 0)) == {b"w": [("CANCEL", 1)]}
    for message in ([*C, CX1], client(request(2), cancel(1)), client(request(2, service=b"\n"))):
        assert broker.receive(message, 1) == []
    assert told(broker.receive(worker(failure(1, 499)), 1)) == {}


def test_a_worker_that_did_not_keep_up_may_come_back():
    broker = broker_with((W, 1))
    broker.gone(b"w", 0)
    broker.receive(worker(ready(1)), 0)
    assert told(broker.receive(client(request(1)), 0)) == {b"w": [("REQUEST", 1, b"x")]}


def test_nothing_is_left_of_a_client_that_spoke_once():
    broker = broker_with()
    broker.receive([*C, CX1], 0)
    broker.receive(client(cancel(5)), 0)
    registry = broker.registry
    assert (registry.clients, registry.proxies, registry.services) == ({}, {}, {})
