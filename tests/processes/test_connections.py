"""A broker's process that runs out of descriptors (C42), and one that is offered more connections than it may have."""

import os
import resource

import pytest
from support.processes import eventually, process
from support.zmtp import Ended, RawPeer

from zmdp.mdp.broker.io.connections import SPARE_FILES

ASK, ANSWER = [b"MDPC02", b"\x01", b"mmi.service", b"x"], [b"MDPC02", b"\x03", b"mmi.service", b"404"]

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit and /proc")


def served(peer: RawPeer) -> bool:
    try:
        return peer.send(*ASK).recv() == ANSWER
    except (Ended, OSError):
        return False


def serves(endpoint: str) -> bool:
    try:
        with RawPeer(endpoint, handshake=False) as peer:
            peer.shake_hands()
            return served(peer)
    except (Ended, OSError):
        return False


def cpu_seconds(pid: int) -> float:
    """The time that a process has spent computing."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = file.read().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def test_c42_a_broker_without_descriptors_says_so_and_serves_again_when_it_has_some() -> None:  # C42
    with process("mdp-broker", "--bind", "tcp://127.0.0.1:*") as broker:
        endpoint = broker.line("tcp://", "stdout")
        kept = RawPeer(endpoint)
        assert served(kept)
        used = len(os.listdir(f"/proc/{broker.pid}/fd"))
        _, hard = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (used + 5 + SPARE_FILES, hard))
        peers = [RawPeer(endpoint, handshake=False) for _ in range(200)]
        broker.line("ended a new connection, for lack of descriptors: this process may have")
        for peer in peers[5:]:
            peer.wait_for_end()  # and none is left in the queue, for which libzmq would try to accept without end
        eventually(lambda: len(os.listdir(f"/proc/{broker.pid}/fd")) <= used + 5)  # others stay free for the broker
        before = cpu_seconds(broker.pid)
        assert served(kept)
        assert cpu_seconds(broker.pid) - before < 1.0
        assert broker.stderr.count("for lack of descriptors") <= 10
        for peer in peers:
            peer.close()
        eventually(lambda: serves(endpoint))
        assert served(kept)
        kept.close()
        assert broker.end() == 0


def test_a_handshake_has_an_end() -> None:
    with process("mdp-broker", "--bind", "tcp://127.0.0.1:*") as broker:
        with RawPeer(broker.line("tcp://", "stdout"), handshake=False) as peer:
            peer.wait_for_end()
        broker.line("a connection failed in its handshake: the peer ended it")
        assert broker.end() == 0
