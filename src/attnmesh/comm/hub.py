"""What the virtual ranks of one run share: their turns, their mail and their claims."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim
from attnmesh.comm.scheduler import Scheduler
from attnmesh.trace.recorder import Message as NotedMessage
from attnmesh.trace.recorder import Recorder
from attnmesh.trace.timeline import Track


class Hub:
    """What the ranks of one run share. Only the rank whose turn it is touches it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.scheduler = Scheduler(world)
        self.claims: defaultdict[int, dict[int, Claim]] = defaultdict(dict)
        self._posted: defaultdict[tuple[int, int], deque[Letter]] = defaultdict(deque)

    def post(self, letter: Letter) -> None:
        """Post one end of a message. Whoever comes second copies, straight from buffer to buffer."""
        queue = self._posted[letter.source, letter.target]
        if queue and queue[0].send != letter.send:
            other = queue.popleft()
            _deliver(*((letter, other) if letter.send else (other, letter)))
        else:
            queue.append(letter)


@dataclass(eq=False)
class Letter:
    """One end of a message between two ranks."""

    verb: str
    source: int
    target: int
    tensor: Tensor
    send: bool
    delivered: bool = False
    misfit: str | None = None
    """Why the two ends do not fit, once they have met and do not."""

    note: NotedMessage | None = None
    """What is noted of it, while its rank is recorded."""

    def noted_by(self, recorder: Recorder) -> None:
        """Let a recorder of this end's rank note when it travels."""
        track: Track
        track, peer = ("send", self.target) if self.send else ("receive", self.source)
        self.note = recorder.message(track, self.verb, peer, self.tensor.nbytes)

    def __str__(self) -> str:
        whom = f"rank {self.target} to receive" if self.send else f"rank {self.source} to send"
        return f"{whom} {self.content()} ({self.verb})"

    def content(self) -> str:
        """What is in it, in words."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"


def _deliver(sent: Letter, wanted: Letter) -> None:
    sent.delivered = wanted.delivered = True
    if sent.tensor.dtype != wanted.tensor.dtype or sent.tensor.numel() != wanted.tensor.numel():
        sent.misfit = wanted.misfit = (
            f"rank {sent.source} sends {sent.content()} ({sent.verb}) "
            f"but rank {sent.target} receives {wanted.content()} ({wanted.verb})"
        )
        return
    notes = [letter.note for letter in (sent, wanted) if letter.note is not None]
    begin = notes[0].recorder.now(wanted.tensor.device) if notes else 0.0
    with torch.no_grad():
        wanted.tensor.copy_(sent.tensor.view(wanted.tensor.shape))
    for note in notes:
        note.done(begin, note.recorder.now(wanted.tensor.device))
