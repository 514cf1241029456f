"""`Submission`: a request that rank 0 passes to all ranks. `Commands`: changes that all ranks make before a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import Request
from attnmesh.generation.sampling import LogitBias, Sampling


@dataclass(frozen=True)
class Submission:
    """The arguments of `Generator.submit`, as plain data."""

    ticket: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: list[int] | None = None
    stop_strings: list[str] = field(default_factory=list)
    min_new_tokens: int = 0
    logprobs: int | None = None
    sample: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: str | None = None
    priority: int = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def submit(self, generator: Generator) -> Request:
        """Submit it. All ranks call this alike."""
        processors = [LogitBias.of(self.logit_bias)] if self.logit_bias else []
        return generator.submit(
            self.prompt, max_new_tokens=self.max_new_tokens, sampling=self.sampling, stop=self.stop,
            stop_strings=self.stop_strings, min_new_tokens=self.min_new_tokens, logprobs=self.logprobs,
            logits_processors=processors, sample=self.sample, grammar=self.grammar, priority=self.priority,
            skip_special_tokens=self.skip_special_tokens, prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip


@dataclass
class Commands:
    """Requests to submit, tickets of requests to move and cancel, in this order; `stop` ends the loop of all ranks."""

    submissions: list[Submission] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # from prefill ranks to decode ranks
    cancelled: list[int] = field(default_factory=list)
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.submissions or self.moved or self.cancelled or self.stop)

    def encode(self) -> bytes:
        """As JSON; empty without commands. Samples of a prompt differ in two fields only: the others are there once."""
        if not self:
            return b""
        groups: list[tuple[Submission, list[tuple[int, int]]]] = []
        for each in self.submissions:
            if not groups or replace(each, ticket=groups[-1][0].ticket, sample=groups[-1][0].sample) != groups[-1][0]:
                groups.append((each, []))
            groups[-1][1].append((each.ticket, each.sample))
        submissions = [{**asdict(first), "samples": samples} for first, samples in groups]
        return json.dumps({**vars(self), "submissions": submissions}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Commands:
        """The commands that `encode` returned."""
        if not data:
            return cls()
        fields: dict[str, Any] = json.loads(data)
        submissions = []
        for each in fields.pop("submissions"):
            samples = each.pop("samples")
            first = Submission(**{**each, "sampling": Sampling(**each["sampling"])})
            submissions += [replace(first, ticket=ticket, sample=sample) for ticket, sample in samples]
        return cls(submissions, **fields)


def broadcast(comm: Comm, commands: Commands | None, device: torch.device) -> Commands:
    """The commands of rank 0, on all ranks; the others pass None. Two messages, or one if there are none."""
    if comm.world == 1:
        assert commands is not None
        return commands
    data = b"" if commands is None else commands.encode()
    size = int(_from_first(comm, torch.tensor([len(data)], dtype=torch.int64, device=device)))
    if not size:
        return Commands()
    own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)  # other ranks do not send theirs
    return Commands.decode(bytes(_from_first(comm, own.to(device), size).cpu().numpy()))


def _from_first(comm: Comm, x: Tensor, size: int = 1) -> Tensor:
    shapes = [(size if rank == 0 else 0,) for rank in range(comm.world)]
    return comm.all_gather(x if comm.rank == 0 else x.new_empty(0), shapes)[0]
