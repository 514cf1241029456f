"""`Generator`: prompts in, tokens out, over any number of ranks.

Sequences are divided among groups of ranks (KVDP), and the ranks of a group shard the positions of each sequence (CP).
Groups prefill and decode independently. After every step they exchange their new tokens, so that every rank yields all.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, CommError, IndependentSubComm, SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.core.validation import check_bool, check_list, check_positive, check_type, shown
from attnmesh.generation.agreement import (
    Progress,
    check_same_weights,
    digest,
    model_values,
    report_error,
)
from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.sampling import (
    INVALID_TOKEN,
    InvalidLogits,
    PromptLookup,
    Sampling,
    TextStream,
    most_likely,
)
from attnmesh.integrations.transformers_models import changing_rotary
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding

_GREEDY = Sampling()
_PADDING = -1  # in place of tokens of rows that are finished


@dataclass(frozen=True)
class Token:
    """A token of a row of the batch, and the text that it completes."""

    row: int
    id: int
    text: str


@dataclass
class GenerationStats:
    """What one rank has computed, sent and stored.

    `kv_bytes` are those that this rank stores, `kv_bytes_unsharded` those that a single device would store.
    `generated_tokens` and `decode_steps` are those of this rank's group.
    """

    rank: int
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_unsharded: int = 0
    bytes_sent: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(eq=False)
class _Row:
    """A row of the batch that is being generated."""

    number: int
    sequence: EngineSequence
    random: torch.Generator
    lookup: PromptLookup = field(default_factory=PromptLookup)
    new: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Request:
    """The options of one `generate` call."""

    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    speculative: bool


class Generator:
    """Generates from a model that every rank of `comm` has, and caches sequences for later prompts.

    The KV cache of a group holds `cache_tokens` tokens, prompts and answers together, of all its sequences;
    `max_sequences` is the size of a batch over all groups. `sharding` is the number of ranks per sequence (cp) and of
    groups (kvdp), by default what `recommend_sharding` returns for `max_sequences` sequences. `layout`, `schedule`,
    `prefill_chunk` and `on_prefill` are those of `Engine`.

    `on_logits` is called with a row and the logits [vocabulary] of each of its new tokens, on the ranks of its group.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        comm: Comm | None = None,
        *,
        cache_tokens: int,
        max_sequences: int = 1,
        sharding: DecodeSharding | None = None,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        prefill_chunk: int | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.comm = model, tokenizer, comm_named("comm", comm)
        self._on_logits = on_logits
        rank = self.comm.rank

        def check_arguments() -> tuple[DecodeSharding, SharedValues]:
            check_positive(cache_tokens=cache_tokens, max_sequences=max_sequences)
            _check_tokenizer(tokenizer)
            for name, callback in (("on_prefill", on_prefill), ("on_logits", on_logits)):
                if callback is not None and not callable(callback):
                    raise ValueError(f"{name} must be a function or None, got {shown(callback)}")
            chosen = _recommended(max_sequences, self.comm.world) if sharding is None else sharding
            check_type("sharding", chosen, DecodeSharding)
            if chosen.tp != 1 or chosen.ranks != self.comm.world:
                raise ValueError(f"sharding must be kvdp x cp = {self.comm.world} ranks and tp = 1, got {chosen}")
            self._group = _subgroup(self.comm, chosen.cp_peers(rank))
            self._across_groups = _subgroup(self.comm, chosen.kvdp_peers(rank))
            self.engine = Engine(
                model, self._group, cache_tokens=cache_tokens, max_sequences=-(-max_sequences // chosen.kvdp),
                layout=layout, schedule=schedule, prefill_chunk=prefill_chunk, on_prefill=on_prefill,
            )  # fmt: skip
            return chosen, {
                "cache_tokens": cache_tokens, "max_sequences": max_sequences, "sharding": repr(chosen),
                "layout": layout, "schedule": schedule, "prefill_chunk": prefill_chunk,
                "dtype": self.model.get_input_embeddings().weight.dtype, "device": self.engine.device.type,
                **model_values(model),
            }  # fmt: skip

        try:
            self.sharding = check_on_all_ranks(self.comm, "Generator", check_arguments, force=True)
        except (ValueError, CommError):
            raise
        except Exception as error:  # such as a cache that does not fit into memory
            report_error(self.comm, "Generator", error)
            raise
        check_same_weights(self.comm, model, self.engine.device)
        if self.engine.device.type == "cpu" and self._all_share_memory():
            self.engine.use_tensor_parallel()
        self.max_sequences, self.stats = max_sequences, GenerationStats(rank)
        self._progress = Progress()
        self._iterator: weakref.ref[abc.Generator[Token, None, None]] | None = None  # of the latest call

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        stop: Sequence[int] | None = None,
        speculative: bool = False,
    ) -> Iterator[Token]:
        """Tokens as they are generated, row by row within a step, the same on every rank.

        A prompt is text, or its token ids. A row ends with one of the `stop` tokens, by default the eos tokens of the
        model's generation config, or after `max_new_tokens`. With `speculative`, tokens are drafted by prompt lookup
        and several are verified per step: fewer steps, the same tokens. `stats` counts the accepted ones.

        One call runs at a time: exhaust, close or drop its iterator before the next. Logits that give no probabilities
        (NaN, +inf, or -inf only) raise ValueError. After an interrupted call the generator works on, unless the ranks
        were interrupted at different points: then every rank raises CommError.
        """

        def check_arguments() -> tuple[tuple[list[list[int]], _Request], SharedValues]:
            if self._is_running():
                raise ValueError("another generate() of this Generator is in progress: exhaust or close it first")
            ends = sorted(self._eos() if stop is None else set(token_ids("stop", stop)))
            check_type("sampling", sampling, Sampling)
            check_bool(speculative=speculative)
            request = _Request(max_new_tokens, sampling, frozenset(ends), speculative)
            rows = _prompt_ids(self.tokenizer, prompts)
            self._check(rows, request)
            return (rows, request), {
                "prompts": f"{len(rows)} of {', '.join(str(len(row)) for row in rows)} tokens {digest(rows)}",
                "stop": ends, "max_new_tokens": max_new_tokens, "sampling": sampling, "speculative": speculative,
                "device": self.engine.device.type,
            }  # fmt: skip

        self._check_in_step()
        rows, request = check_on_all_ranks(self.comm, "generate", check_arguments, force=True)
        self._progress.begin_call(rows)
        iterator = self._generate(rows, request)
        self._iterator = weakref.ref(iterator)
        return iterator

    def _all_share_memory(self) -> bool:
        """Whether all ranks exchange small messages through memory. Over sockets tensor parallelism does not pay."""
        own = torch.tensor([self.comm.shares_memory], dtype=torch.int8, device="cpu")
        return all(map(bool, self.comm.all_gather(own, [(1,)] * self.comm.world)))

    def _is_running(self) -> bool:
        """Whether the iterator of the latest call is neither exhausted nor closed nor dropped."""
        latest = None if self._iterator is None else self._iterator()
        return latest is not None and inspect.getgeneratorstate(latest) != inspect.GEN_CLOSED

    def _check_in_step(self) -> None:
        """Raise CommError after an interrupted exchange; log how far this rank is, to be compared with the others."""
        if self.engine.is_out_of_step:
            raise CommError(
                f"generate: an earlier call was interrupted on rank {self.comm.rank} while ranks exchanged messages: "
                "ranks are out of step; start them again, or make a new Generator on a new process group"
            )
        if not self._is_running():
            self.engine.release_all()  # again, in case that was interrupted, too
        self.comm.note("earlier calls", str(self._progress))
        self._group.note("cached sequences", self.engine.state())

    def _generate(self, prompts: list[list[int]], request: _Request) -> abc.Generator[Token, None, None]:
        batch = len(prompts)
        texts = [TextStream(self.tokenizer) for _ in prompts]
        own: list[_Row] = []
        bytes_before = self.comm.traffic.bytes
        try:
            with self._timed("prefill_seconds"):
                for number in self.sharding.sequences(self.comm.rank, batch):
                    sequence = self.engine.prefill(prompts[number], request.max_new_tokens + MAX_DECODE_TOKENS)
                    own.append(_Row(number, sequence, request.sampling.generator(number)))
                logits = [row.sequence.logits[None] for row in own]
                new = self._broadcast(_sample(request.sampling, own, logits))
                self._report_logits(own, logits, new)
            active, left = own, dict.fromkeys(range(batch), request.max_new_tokens)
            while True:
                gathered = self._all_gather_tokens(active, new, batch)
                self._check_tokens(gathered, own)
                self._progress.add_step(gathered)
                for row, tokens in zip(active, new, strict=True):
                    row.new += tokens
                    self.stats.generated_tokens += len(tokens)
                for number, tokens in gathered:
                    left[number] = 0 if tokens[-1] in request.stop else left[number] - len(tokens)
                    for token in tokens:
                        yield Token(number, token, texts[number].add(token))
                if not any(left.values()):
                    break
                active = [row for row in active if left[row.number]]
                with self._timed("decode_seconds"):
                    new = self._decode_step(active, request) if active else []
        except (GeneratorExit, InvalidLogits):  # closed, or raised on all ranks together
            raise
        except BaseException as error:
            self._report_interruption(error)
            raise
        finally:
            self.stats.bytes_sent += self.comm.traffic.bytes - bytes_before
            self.engine.release_all()
            self._update_stats()

    def _check_tokens(self, new: list[tuple[int, list[int]]], own: list[_Row]) -> None:
        """Raise InvalidLogits, on every rank, if any row of any group has invalid logits."""
        rows = [number for number, tokens in new if tokens[-1] == INVALID_TOKEN]
        if rows:
            for row in own:
                self.engine.free(row.sequence)  # its keys and values may be invalid, too
            raise InvalidLogits(
                f"generate: the logits of row {', '.join(map(str, rows))} have a NaN or +inf, or -inf only, at step "
                f"{self._progress.steps} (the prompt is step 0): no token can be chosen; check the weights of the "
                f"model and the range of its dtype, {self.model.get_input_embeddings().weight.dtype}"
            )

    def _report_interruption(self, error: BaseException) -> None:
        """Tell the other ranks, which may wait for this one."""
        if not self.engine.is_out_of_step:
            report_error(self.comm, "generate", error)
        elif not isinstance(error, CommError):
            self.comm.fail(f"generate was interrupted by {type(error).__name__}: {error}")

    def _decode_step(self, active: list[_Row], request: _Request) -> list[list[int]]:
        """One decode step of the group's rows: the new tokens of each, one or (with drafts) more."""
        drafts = [self._draft(row, request.max_new_tokens) if request.speculative else [] for row in active]
        width = max(map(len, drafts))
        begins = [len(row.sequence.ids) for row in active]
        # Shorter drafts are padded with token 0, which is truncated with the rejected tokens.
        given = [[row.new[-1], *draft, *[0] * (width - len(draft))] for row, draft in zip(active, drafts, strict=True)]
        logits = self.engine.decode([row.sequence for row in active], given)
        self.stats.decode_steps += 1
        if request.speculative:
            greedy = self._broadcast(most_likely(logits).tolist())
            new = [_accept(draft, tokens) for draft, tokens in zip(drafts, greedy, strict=True)]
        else:
            new = self._broadcast(_sample(request.sampling, active, logits))
        for row, begin, draft, tokens in zip(active, begins, drafts, new, strict=True):
            if len(row.sequence.ids) > begin + len(tokens):
                self.engine.truncate(row.sequence, begin + len(tokens))
            del tokens[request.max_new_tokens - len(row.new) :]
            stopped = next((i for i, token in enumerate(tokens) if token in request.stop), len(tokens))
            del tokens[stopped + 1 :]
            self.stats.draft_tokens += len(draft)
            self.stats.accepted_tokens += len(tokens) - 1
        self._report_logits(active, logits, new)
        return new

    def _report_logits(self, rows: list[_Row], logits: Sequence[Tensor] | Tensor, new: list[list[int]]) -> None:
        if self._on_logits is not None:
            for row, of_row, tokens in zip(rows, logits, new, strict=True):
                for of_token in of_row[: len(tokens)].clone():  # the next step may overwrite them
                    self._on_logits(row.number, of_token)

    def _draft(self, row: _Row, max_new_tokens: int) -> list[int]:
        """Draft tokens: no more than may be generated, or than one step can verify."""
        room = min(MAX_DECODE_TOKENS, max_new_tokens - len(row.new)) - 1
        return row.lookup.draft([*row.sequence.ids, row.new[-1]], room) if room > 0 else []

    def _broadcast(self, tokens: list[list[int]]) -> list[list[int]]:
        """The tokens that the first rank of the group has sampled: ranks may round differently and must not diverge.

        Invalid are those that any rank of the group finds invalid.
        """
        group = self._group
        if group.world == 1 or not tokens:
            return tokens
        x = torch.tensor(tokens, dtype=torch.int64, device=self.engine.device)  # NCCL sends device tensors only
        with self.engine.exchange(group):
            received = torch.stack(group.all_gather(x, [x.shape] * group.world))
            invalid = (received == INVALID_TOKEN).any(0)
            agreed: list[list[int]] = torch.where(invalid, INVALID_TOKEN, received[0]).tolist()
        return agreed

    def _all_gather_tokens(self, active: list[_Row], new: list[list[int]], batch: int) -> list[tuple[int, list[int]]]:
        """The new tokens of all groups, by row."""
        by_row = {row.number: tokens for row, tokens in zip(active, new, strict=True)}
        if self._across_groups.world == 1:
            return sorted(by_row.items())
        rows = [self.sharding.sequences(peer, batch) for peer in self.sharding.kvdp_peers(self.comm.rank)]
        own = rows[self._across_groups.rank]
        x = torch.full((len(own), MAX_DECODE_TOKENS), _PADDING, dtype=torch.int64, device="cpu")
        for number, tokens in by_row.items():
            x[number - own.start, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        with self.engine.exchange(self._across_groups):
            gathered = self._across_groups.all_gather(
                x.to(self.engine.device), [(len(each), MAX_DECODE_TOKENS) for each in rows]
            )
        unpadded = [
            (number, [token for token in tokens if token != _PADDING])
            for numbers, part in zip(rows, gathered, strict=True)
            for number, tokens in zip(numbers, part.tolist(), strict=True)
        ]
        return [(number, tokens) for number, tokens in sorted(unpadded) if tokens]

    def _eos(self) -> set[int]:
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)

    def _check(self, rows: list[list[int]], request: _Request) -> None:
        if not 1 <= len(rows) <= self.max_sequences:
            raise ValueError(f"prompts must be 1 to max_sequences={self.max_sequences}, got {len(rows)}")
        new = request.max_new_tokens
        check_positive(max_new_tokens=new)
        if request.speculative and not request.sampling.greedy:
            raise ValueError(f"sampling must be greedy (temperature 0) with speculative, got {request.sampling}")
        limit, why = getattr(self.model.config, "max_position_embeddings", None), ""
        rotary = changing_rotary(self.model.config)
        if rotary is not None:
            limit, why = rotary[1], f" before rope_type {rotary[0]!r} changes its frequencies"
        vocabulary = self.model.config.vocab_size
        for number, ids in enumerate(rows):
            if not ids:
                raise ValueError(f"prompts[{number}] is empty")
            if len(ids) < self._group.world:
                raise ValueError(
                    f"prompts[{number}] has {len(ids)} tokens, fewer than the {self._group.world} ranks that shard it"
                )
            if limit is not None and len(ids) + new > limit:
                raise ValueError(
                    f"prompts[{number}] has {len(ids)} tokens, and max_new_tokens={new} may follow: the model has "
                    f"{limit} positions{why}"
                )
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ValueError(
                    f"prompts[{number}] must have token ids 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}"
                )
        # Rows of this group only: if one group has no room, all ranks raise before any of them starts.
        own = [rows[number] for number in self.sharding.sequences(self.comm.rank, len(rows))]
        self.engine.check_room([len(ids) + new + MAX_DECODE_TOKENS for ids in own])

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - began)

    def _update_stats(self) -> None:
        engine, stats = self.engine, self.stats
        stats.cached_tokens = sum(len(sequence.local) for sequence in engine.sequences)
        stats.kv_bytes = stats.cached_tokens * engine.kv_bytes_per_token
        stats.kv_bytes_unsharded = sum(len(sequence.ids) for sequence in engine.sequences) * engine.kv_bytes_per_token
        stats.prefill_tokens, stats.reused_tokens = engine.prefill_tokens, engine.reused_tokens


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
    """Tokens for these prompts, as they are generated, from a model that every rank of `comm` has: see `Generator`.

    All ranks must pass the same arguments. Nothing is cached for later prompts: use a `Generator` for that.
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[list[list[int]], SharedValues]:
        check_positive(max_new_tokens=max_new_tokens)
        _check_tokenizer(tokenizer)
        return _prompt_ids(tokenizer, prompts), {}

    rows = check_on_all_ranks(comm, "generate", check_arguments, force=True)
    generator = Generator(
        model, tokenizer, comm, max_sequences=max(1, len(rows)), sharding=sharding, layout=layout,
        cache_tokens=max(1, sum(map(len, rows)) + len(rows) * (max_new_tokens + MAX_DECODE_TOKENS)),
        prefill_chunk=prefill_chunk,
    )  # fmt: skip
    return generator.generate(
        rows, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, speculative=speculative
    )


def _recommended(sequences: int, ranks: int) -> DecodeSharding:
    from attnmesh.planner.recommend import recommend_sharding

    # Every rank has all weights, so no kv heads are divided: as with a single kv head.
    return recommend_sharding(sequences, ranks, 1, ranks).choice.sharding


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ValueError(f"tokenizer must be a tokenizer of Transformers or None, got {shown(tokenizer)}")


def _prompt_ids(tokenizer: Any, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """The token ids of every prompt."""
    is_matrix = isinstance(prompts, Tensor) and prompts.ndim == 2
    rows: list[Any] = list(prompts) if is_matrix else check_list("prompts", prompts, "prompts")
    for i, prompt in enumerate(rows):
        if not isinstance(prompt, str):
            rows[i] = list(token_ids(f"prompts[{i}]", prompt))
        elif tokenizer is None:
            raise ValueError(f"prompts must be token ids without a tokenizer, got text, {shown(prompt)}")
        else:
            rows[i] = tokenizer(prompt)["input_ids"]
    return rows


def _sample(sampling: Sampling, rows: list[_Row], logits: list[Tensor] | Tensor) -> list[list[int]]:
    """The next token of each row, from its logits [1, vocabulary]; `INVALID_TOKEN` where these are invalid."""
    if sampling.greedy and rows:  # one transfer for all rows
        tokens: list[list[int]] = most_likely(logits if isinstance(logits, Tensor) else torch.stack(logits)).tolist()
        return tokens
    sampled = []
    for row, of_row in zip(rows, logits, strict=True):
        try:
            sampled.append([sampling.sample(of_row[0], row.random)])
        except InvalidLogits:
            sampled.append([INVALID_TOKEN])
    return sampled


def _accept(draft: list[int], greedy: list[int]) -> list[int]:
    """The new tokens, from the greedy token after each given one: the correct prefix of a draft, and one more."""
    correct = next((i for i, token in enumerate(draft) if token != greedy[i]), len(draft))
    return greedy[: correct + 1]


def _subgroup(comm: Comm, members: list[int]) -> Comm:
    return comm if len(members) == comm.world else IndependentSubComm(comm, members)
