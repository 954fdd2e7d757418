"""Turns of a broker's machine in which one thing happens: each function returns the messages that it sends then."""

from typing import Any


def receive(broker: Any, message: Any, now: float, role: Any = None) -> Any:
    broker.receive(message, now, role)
    return broker.take_messages()


def tick(broker: Any, now: float, heard: float | None = None) -> Any:
    broker.tick(now, heard)
    return broker.take_messages()


def disconnected(broker: Any, identity: bytes, turn: int, now: float) -> Any:
    broker.disconnected(identity, turn, now)
    return broker.take_messages()


def give_up(broker: Any, identity: bytes, now: float) -> Any:
    broker.give_up(identity, now)
    return broker.take_messages()


def probe(broker: Any, identity: bytes, now: float) -> Any:
    broker.probe(identity, now)
    return broker.take_messages()


def grant(broker: Any, permissions: Any, now: float) -> Any:
    broker.grant(permissions, now)
    return broker.take_messages()


def drain(broker: Any, now: float) -> Any:
    broker.drain(now)
    return broker.take_messages()


def close(broker: Any, now: float) -> Any:
    broker.close(now)
    return broker.take_messages()


def link_opened(broker: Any, identity: bytes, now: float, role: Any = None) -> Any:
    broker.link_opened(identity, now, role)
    return broker.take_messages()


def link_failed(broker: Any, identity: bytes, why: str, now: float) -> Any:
    broker.link_failed(identity, why, now)
    return broker.take_messages()
