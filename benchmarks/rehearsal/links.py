"""Bytes of links: what interfaces counted, how much of it is protocol, and what programs send from node to node.

An interface counts whole packets. Every packet has an Ethernet, an IP and a TCP header; an acknowledgment is nothing
else. So the payload of a link is its bytes less the headers of its packets, in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnmesh.planner.program import Ints, MessageTotals, Program

ETHERNET, IP, TCP = 14, 20, 32  # bytes; the TCP header carries a timestamp
HEADERS = ETHERNET + IP + TCP


@dataclass(frozen=True)
class Counters:
    """What an interface has counted: bytes and packets, in both directions."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    @staticmethod
    def read(interface: str, text: str | None = None) -> Counters:
        """The counters of this network namespace, or of a `text` of the form of /proc/net/dev."""
        text = Path("/proc/net/dev").read_text() if text is None else text
        for line in text.splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = [int(number) for number in numbers.split()]
                return Counters(fields[0], fields[1], fields[8], fields[9])
        raise ValueError(f"interface must be one of this network namespace, got {interface!r}")

    def since(self, before: Counters) -> Counters:
        """What was counted since."""
        return Counters(
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
        )

    @property
    def sent(self) -> int:
        """Payload bytes sent."""
        return self.sent_bytes - HEADERS * self.sent_packets

    @property
    def received(self) -> int:
        """Payload bytes received."""
        return self.received_bytes - HEADERS * self.received_packets

    @property
    def overhead(self) -> float:
        """Bytes of headers and acknowledgments per byte of payload, of both directions together."""
        headers = HEADERS * (self.sent_packets + self.received_packets)
        return headers / max(self.sent + self.received, 1)


@dataclass(frozen=True)
class LinkBytes:
    """The payload that every node sends to and receives from other nodes."""

    sent: Ints
    received: Ints

    @property
    def between_nodes(self) -> int:
        """All bytes that leave a node."""
        return int(self.sent.sum())

    def ratio_to(self, planned: LinkBytes) -> float:
        """The bytes of the link, and direction, that differs most from the plan, over those planned."""
        measured = np.concatenate([self.sent, self.received]).astype(np.float64)
        expected = np.concatenate([planned.sent, planned.received]).astype(np.float64)
        if not expected.all():
            return float("inf") if measured[expected == 0].any() else 1.0
        ratios = measured / expected
        return float(ratios[np.abs(np.log(np.maximum(ratios, 1e-9))).argmax()])


def counted_links(counters: Sequence[Counters], runs: int) -> LinkBytes:
    """The payload per run, of the counters of every node."""
    sent, received = ([getattr(each, way) / runs for each in counters] for way in ("sent", "received"))
    return LinkBytes(np.array(sent, dtype=np.int64), np.array(received, dtype=np.int64))


def planned_links(programs: Iterable[Program], ranks_per_node: int) -> LinkBytes:
    """The payload that programs send from node to node."""
    sent = received = np.zeros(0, dtype=np.int64)
    for program in programs:
        nodes = -(-program.world // ranks_per_node)
        sent, received = (np.pad(total, (0, nodes - len(total))) for total in (sent, received))
        for round_ in program.rounds():
            for messages in round_.starts.values():
                if isinstance(messages, MessageTotals):
                    raise ValueError("links need programs whose messages are listed, got totals only")
                source, target = messages.source // ranks_per_node, messages.target // ranks_per_node
                between = source != target
                np.add.at(sent, source[between], messages.nbytes[between])
                np.add.at(received, target[between], messages.nbytes[between])
    return LinkBytes(sent, received)
