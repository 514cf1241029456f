"""`Generator`: prompts in, tokens out, over as many ranks as there are.

Sequences are dealt to groups of ranks (KVDP), and the ranks of a group share the positions of each (CP). A group reads
and steps on its own; after every round the groups tell one another their new tokens, so that every rank yields all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, IndependentSubComm, SharedValues, check_on_all_ranks, comm_from
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.generation.engine import Reader, Reading
from attnmesh.generation.sampling import Lookup, NewText, Sampling
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.plan.decode import DecodeSharding

_GREEDY = Sampling()
_NONE = -1  # where a row has no more tokens in a round


@dataclass(frozen=True)
class Token:
    """A token of a row of the batch, and the text that it completes."""

    row: int
    id: int
    text: str


@dataclass
class GenerationStats:
    """What one rank has done and holds."""

    rank: int
    tokens_held: int = 0
    kv_bytes: int = 0
    kv_bytes_alone: int = 0  # what one device would need for all of it
    bytes_sent: int = 0
    read: int = 0
    reused: int = 0
    generated: int = 0  # by this rank's group
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(eq=False)
class _Row:
    """A sequence being generated."""

    number: int
    reading: Reading
    dice: torch.Generator
    lookup: Lookup = field(default_factory=Lookup)
    new: list[int] = field(default_factory=list)


class Generator:
    """Generates from a model that every rank of `comm` has, and keeps what it has read for the next prompts.

    There is room for `tokens` tokens, prompts and answers together, of at most `sequences` sequences. `sharding` says
    how many ranks share a sequence (cp) and how many groups there are (kvdp); by default it is what
    `recommend_sharding` says for so many sequences. `layout`, `schedule`, `prefill_chunk` and `on_read` are a `Reader`'s.

    `on_logits` is called with a row and the logits [vocabulary] of every token of it that comes, on the ranks that
    have them: those of the row's group.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        comm: Comm | None = None,
        *,
        tokens: int,
        sequences: int = 1,
        sharding: DecodeSharding | None = None,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        prefill_chunk: int | None = None,
        on_read: Callable[[int, int], None] | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.comm = model, tokenizer, comm_from(comm)
        self._on_logits = on_logits
        if sharding is None:
            # Every rank has whole weights, so no kv heads are divided: as if there were one.
            world = self.comm.world
            from attnmesh.planner.recommend import recommend_sharding

            sharding = recommend_sharding(sequences, world, 1, world).choice.sharding
        if sharding.tp != 1 or sharding.ranks != self.comm.world:
            raise ValueError(f"sharding must be kvdp x cp = {self.comm.world} ranks and tp = 1, got {sharding}")
        self.sharding = sharding
        rank = self.comm.rank
        self._group = _part(self.comm, sharding.cp_peers(rank))
        self._others = _part(self.comm, sharding.kvdp_peers(rank))
        per_group = -(-sequences // sharding.kvdp)
        self.sequences = sequences
        self.reader = Reader(
            model,
            self._group,
            tokens=tokens,
            sequences=per_group,
            layout=layout,
            schedule=schedule,
            prefill_chunk=prefill_chunk,
            on_read=on_read,
        )
        self.effort = GenerationStats(rank)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        stop: Sequence[int] | None = None,
        speculative: bool = False,
    ) -> Iterator[Token]:
        """Tokens as they come, row by row within a round, the same on every rank.

        A prompt is text, or its tokens. A row ends with one of the `stop` tokens, by default those that the model's
        generation config calls eos, or after `max_new_tokens`. With `speculative` tokens are drafted from the text
        itself and verified several at a time: fewer steps, the same tokens; `effort` says how many drafts were right.
        """
        stops = self._stops() if stop is None else set(stop)

        def check_arguments() -> tuple[list[list[int]], SharedValues]:
            rows = [_ids(self.tokenizer, prompt) for prompt in prompts]
            self._check(rows, max_new_tokens, sampling, speculative)
            said = sha256(repr((rows, sorted(stops))).encode()).hexdigest()
            return rows, {
                "prompts and stops": said, "max_new_tokens": max_new_tokens, "sampling": sampling,
                "speculative": speculative, "sharding": self.sharding,
            }  # fmt: skip

        rows = check_on_all_ranks(self.comm, "generate", check_arguments, force=True)
        return self._generate(rows, max_new_tokens, sampling, stops, speculative)

    def _generate(
        self, rows: list[list[int]], most: int, sampling: Sampling, stops: set[int], speculative: bool
    ) -> Iterator[Token]:
        batch = len(rows)
        texts = [NewText(self.tokenizer) for _ in rows]
        mine: list[_Row] = []
        before = self.comm.traffic.bytes
        try:
            with self._timed("prefill_seconds"):
                for number in self.sharding.sequences(self.comm.rank, batch):
                    reading = self.reader.read(rows[number], more=most + MAX_DECODE_TOKENS)
                    mine.append(_Row(number, reading, sampling.dice(number)))
                fresh = self._agreed([[sampling.draw(row.reading.logits, row.dice)] for row in mine])
                self._show_logits(mine, [row.reading.logits[None] for row in mine], fresh)
            active, left = mine, dict.fromkeys(range(batch), most)
            while True:
                for row, new in zip(active, fresh, strict=True):
                    row.new += new
                    self.effort.generated += len(new)
                for number, new in self._told(active, fresh, batch):
                    left[number] = 0 if new[-1] in stops else left[number] - len(new)
                    for token in new:
                        yield Token(number, token, texts[number].add(token))
                if not any(left.values()):
                    break
                active = [row for row in active if left[row.number]]
                with self._timed("decode_seconds"):
                    fresh = self._round(active, most, sampling, stops, speculative) if active else []
        finally:
            self.effort.bytes_sent += self.comm.traffic.bytes - before
            for row in mine:
                self.reader.rest(row.reading)
            self._count()

    def _round(
        self, active: list[_Row], most: int, sampling: Sampling, stops: set[int], speculative: bool
    ) -> list[list[int]]:
        """One step of the group's rows: the new tokens of each, one or (with drafts) more."""
        drafts = [self._draft(row, most) if speculative else [] for row in active]
        width = max(map(len, drafts))
        begins = [len(row.reading.ids) for row in active]
        # Shorter drafts are filled up with anything, to be cut off with what is rejected.
        given = [[row.new[-1], *draft, *[0] * (width - len(draft))] for row, draft in zip(active, drafts, strict=True)]
        logits = self.reader.step([row.reading for row in active], given)
        self.effort.steps += 1
        if speculative:
            likeliest = self._agreed(logits.argmax(-1).tolist())
            fresh = [_verified(draft, row) for draft, row in zip(drafts, likeliest, strict=True)]
        else:
            drawn = [[sampling.draw(x[0], row.dice)] for x, row in zip(logits, active, strict=True)]
            fresh = self._agreed(drawn)
        for row, begin, draft, new in zip(active, begins, drafts, fresh, strict=True):
            if len(row.reading.ids) > begin + len(new):
                self.reader.truncate(row.reading, begin + len(new))
            del new[most - len(row.new) :]
            stopped = next((i for i, token in enumerate(new) if token in stops), len(new))
            del new[stopped + 1 :]
            self.effort.drafted += len(draft)
            self.effort.accepted += len(new) - 1
        self._show_logits(active, logits, fresh)
        return fresh

    def _show_logits(self, rows: list[_Row], logits: Sequence[Tensor] | Tensor, fresh: list[list[int]]) -> None:
        if self._on_logits is not None:
            for row, theirs, new in zip(rows, logits, fresh, strict=True):
                for of_one in theirs[: len(new)]:
                    self._on_logits(row.number, of_one)

    def _draft(self, row: _Row, most: int) -> list[int]:
        """What may come next; no more than may be generated, or than a step can verify."""
        room = min(MAX_DECODE_TOKENS, most - len(row.new)) - 1
        return row.lookup.draft([*row.reading.ids, row.new[-1]], room) if room > 0 else []

    def _agreed(self, tokens: list[list[int]]) -> list[list[int]]:
        """The group's tokens as its first rank has drawn them: a rank that rounds otherwise must not go elsewhere."""
        group = self._group
        if group.world == 1 or not tokens:
            return tokens
        x = torch.tensor(tokens, dtype=torch.int64, device=self.reader.device)  # NCCL carries nothing else
        first: Tensor = group.all_gather(x, [x.shape] * group.world)[0]
        agreed: list[list[int]] = first.tolist()
        return agreed

    def _told(self, active: list[_Row], fresh: list[list[int]], batch: int) -> list[tuple[int, list[int]]]:
        """The new tokens of all groups, by row."""
        by_row = {row.number: new for row, new in zip(active, fresh, strict=True)}
        if self._others.world == 1:
            return sorted(by_row.items())
        rows = [self.sharding.sequences(peer, batch) for peer in self.sharding.kvdp_peers(self.comm.rank)]
        own = rows[self._others.rank]
        x = torch.full((len(own), MAX_DECODE_TOKENS), _NONE, dtype=torch.int64)
        for number, new in by_row.items():
            x[number - own.start, : len(new)] = torch.tensor(new, dtype=torch.int64)
        everybodys = self._others.all_gather(x.to(self.reader.device), [(len(r), MAX_DECODE_TOKENS) for r in rows])
        told = [
            (number, [token for token in new if token != _NONE])
            for numbers, part in zip(rows, everybodys, strict=True)
            for number, new in zip(numbers, part.tolist(), strict=True)
        ]
        return [(number, new) for number, new in sorted(told) if new]

    def _stops(self) -> set[int]:
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)

    def _check(self, rows: list[list[int]], most: int, sampling: Sampling, speculative: bool) -> None:
        if not 1 <= len(rows) <= self.sequences:
            raise ValueError(f"prompts must be 1 to {self.sequences}, as this generator has room for, got {len(rows)}")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_new_tokens must be a positive integer, got {most!r}")
        if speculative and not sampling.greedy:
            raise ValueError(f"speculative decoding verifies the likeliest tokens, temperature 0; got {sampling}")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        vocabulary = self.model.config.vocab_size
        for number, ids in enumerate(rows):
            if not ids:
                raise ValueError(f"prompt {number} is empty")
            if len(ids) < self._group.world:
                raise ValueError(
                    f"prompt {number} has {len(ids)} tokens, fewer than the {self._group.world} ranks it is spread over"
                )
            if limit is not None and len(ids) + most > limit:
                raise ValueError(
                    f"prompt {number} has {len(ids)} tokens, and {most} may follow: the model has {limit} positions"
                )
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ValueError(
                    f"prompt {number} must hold tokens 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}"
                )
        # Of this group's rows: what one group has no room for, all ranks hear of before any of them reads.
        mine = [rows[number] for number in self.sharding.sequences(self.comm.rank, len(rows))]
        self.reader.check_room([len(ids) + most + MAX_DECODE_TOKENS for ids in mine])

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.reader.device.type == "cuda":
            torch.cuda.synchronize(self.reader.device)
        setattr(self.effort, what, getattr(self.effort, what) + time.perf_counter() - began)

    def _count(self) -> None:
        """What this rank holds, and what of it was read."""
        reader, effort = self.reader, self.effort
        effort.tokens_held = sum(len(reading.held) for reading in reader.readings)
        effort.kv_bytes = effort.tokens_held * reader.token_bytes
        effort.kv_bytes_alone = sum(len(reading.ids) for reading in reader.readings) * reader.token_bytes
        effort.read, effort.reused = reader.work.read, reader.work.reused


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    comm: Comm | None = None,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = _GREEDY,
    stop: Sequence[int] | None = None,
    speculative: bool = False,
    sharding: DecodeSharding | None = None,
    layout: Layout = Zigzag(),  # noqa: B008  (immutable)
    prefill_chunk: int | None = None,
) -> Iterator[Token]:
    """Tokens for these prompts, as they come, from a model that every rank of `comm` has: see `Generator`.

    All ranks call it alike. Nothing is kept for later prompts: for that, make a `Generator`.
    """
    rows = [_ids(tokenizer, prompt) for prompt in prompts]
    generator = Generator(
        model, tokenizer, comm, tokens=max(1, sum(map(len, rows)) + len(rows) * (max_new_tokens + MAX_DECODE_TOKENS)),
        sequences=max(1, len(rows)), sharding=sharding, layout=layout, prefill_chunk=prefill_chunk,
    )  # fmt: skip
    return generator.generate(
        rows, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, speculative=speculative
    )


def _ids(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ValueError("prompts must be tokens, since there is no tokenizer; got text")
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def _verified(draft: list[int], likeliest: list[int]) -> list[int]:
    """What follows, from the likeliest token after each of those given: drafts while they are right, and one more."""
    right = next((i for i, token in enumerate(draft) if token != likeliest[i]), len(draft))
    return likeliest[: right + 1]


def _part(comm: Comm, members: list[int]) -> Comm:
    return comm if len(members) == comm.world else IndependentSubComm(comm, members)
