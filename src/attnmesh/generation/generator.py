"""`Generator`: prompts in, tokens out, over any number of ranks.

Sequences are divided among groups of ranks (KVDP), and the ranks of a group shard the positions of each sequence (CP).
Groups prefill and decode independently. After every step they exchange their new tokens, so that every rank yields all.
"""

from __future__ import annotations

import inspect
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, CommError, IndependentSubComm, SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.core.text import counted
from attnmesh.core.validation import check_bool, check_count, check_positive, check_type, shown
from attnmesh.generation.agreement import (
    Progress,
    check_same_weights,
    digest,
    model_values,
    report_error,
)
from attnmesh.generation.batching import BatchRanks, ContinuousBatch
from attnmesh.generation.beams import BeamBatch
from attnmesh.generation.prefill_shards import min_prefill_chunk
from attnmesh.generation.prompt_batch import BatchOptions, PromptBatch
from attnmesh.generation.prompts import check_prompt, check_tokenizer, eos_tokens, one_prompt, prompt_ids
from attnmesh.generation.requests import LogitsProcessor, Request, RequestOptions, Token
from attnmesh.generation.sampling import InvalidLogits, Sampling
from attnmesh.generation.sharded_engine import engine_for
from attnmesh.generation.stats import GenerationStats
from attnmesh.integrations.sharded_model import ShardedWeights, sharded_weights
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding

_GREEDY = Sampling()
_STEP_TOKENS = 2048


class Generator:
    """Generates from a model over the ranks of `comm`, and caches sequences for later prompts.

    Every rank has the whole model, or its part of a sharded one (`load_model` with a sharding, `shard_model`).

    The KV cache of a group holds `cache_tokens` tokens, prompts and answers together, of all its sequences;
    `max_sequences` is the size of a batch over all groups. `sharding` is the number of ranks per sequence (cp) and of
    groups (kvdp), by default what `recommend_sharding` returns for `max_sequences` sequences, or that of the sharded
    model. `storage`, fp8, int8 or bfp8, or fp8_ds_mla for latents (DeepSeek), quantizes the cache; by default it has
    the dtype of the model. All tokens, also those of the same prompt, attend to quantized keys and values, so the
    answers do not depend on ranks, chunks or prefix reuse. `layout`, `schedule`, `prefill_chunk` and `on_prefill` are
    those of `Engine`.

    `generate` answers a batch of prompts. `submit` takes one request at a time, and `step` computes the next token of
    all requests in progress: a group computes at most `step_tokens` tokens per step (default 2048, or more if
    `max_sequences` requires it), so that long prompts do not delay answers. `on_prefill` is for `generate` only.

    `on_logits` is called with a row, or the number of a request, and the logits [vocabulary] of each of its new tokens,
    on the ranks of its group.

    Examples:
        >>> generator = am.Generator(model, cache_tokens=64, max_sequences=2)
        >>> answer = [token.id for token in generator.generate([[1, 2, 3]], max_new_tokens=4, stop=[])]
        >>> request = generator.submit([1, 2, 3], max_new_tokens=4, stop=[])
        >>> while not request.finished:
        ...     tokens = generator.step()
        >>> request.ids == answer, generator.stats.generated_tokens
        (True, 8)
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
        storage: str | None = None,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        prefill_chunk: int | None = None,
        step_tokens: int | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.comm = model, tokenizer, comm_named("comm", comm)
        self._on_logits = on_logits
        rank = self.comm.rank

        def check_arguments() -> tuple[DecodeSharding, SharedValues]:
            check_positive(cache_tokens=cache_tokens, max_sequences=max_sequences)
            check_tokenizer(tokenizer)
            for name, callback in (("on_prefill", on_prefill), ("on_logits", on_logits)):
                if callback is not None and not callable(callback):
                    raise ValueError(f"{name} must be a function or None, got {shown(callback)}")
            weights = sharded_weights(model)
            chosen = _sharding(sharding, weights, max_sequences, self.comm)
            group = list(range(self.comm.world)) if weights else chosen.cp_peers(rank)
            self._ranks = BatchRanks(
                _subgroup(self.comm, group), _subgroup(self.comm, [rank] if weights else chosen.kvdp_peers(rank)),
                chosen.kvdp, together=weights is not None,
            )  # fmt: skip
            self.engine = engine_for(
                model, self._ranks.group, cache_tokens=cache_tokens, max_sequences=-(-max_sequences // chosen.kvdp),
                storage=storage, layout=layout, schedule=schedule, prefill_chunk=prefill_chunk, on_prefill=on_prefill,
            )  # fmt: skip
            self._step_tokens = self._checked_step_tokens(step_tokens)
            return chosen, {
                "cache_tokens": cache_tokens, "max_sequences": max_sequences, "sharding": repr(chosen),
                "storage": self.engine.storage, "layout": layout, "schedule": schedule,
                "prefill_chunk": prefill_chunk, "step_tokens": step_tokens,
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
        if self.engine.device.type == "cpu" and not self._ranks.together and self._all_share_memory():
            self.engine.use_tensor_parallel()
        self.max_sequences, self.stats = max_sequences, GenerationStats(rank)
        self._progress = Progress(self.comm.log.number("Generator"))
        self._iterator: weakref.ref[abc.Generator[Token, None, None]] | None = None  # of the latest call
        self._batch: ContinuousBatch | None = None  # submitted requests; None after a call of generate
        self._submitted = 0
        self._owner = object()  # of requests: without a reference to this

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        stop: Sequence[int] | None = None,
        speculative: bool = False,
        num_beams: int = 1,
    ) -> Iterator[Token]:
        """Tokens as they are generated, row by row within a step, the same on every rank.

        A prompt is text, or its token ids. A row ends with one of the `stop` tokens, by default the eos tokens of the
        model's generation config, or after `max_new_tokens`. With `speculative`, tokens are drafted by prompt lookup
        and several are verified per step: fewer steps, the same tokens. `stats` counts the accepted ones. With
        `num_beams` above 1, the answer is the best that a beam search finds, and tokens come at its end: the beams of a
        row are as many sequences, which share the prompt.

        One call runs at a time: take all tokens of its iterator, close or drop it before the next. Logits that give no
        probabilities (NaN, +inf, or -inf only) raise ValueError. After an interrupted call the generator works on,
        unless the ranks were interrupted at different points: then every rank raises CommError.
        """

        def check_arguments() -> tuple[tuple[list[list[int]], BatchOptions], SharedValues]:
            self._check_not_running()
            if self.num_unfinished:
                raise ValueError(
                    f"generate needs all submitted requests to be finished, got {self.num_unfinished} more"
                )
            ends = sorted(eos_tokens(self.model) if stop is None else set(token_ids("stop", stop)))
            check_type("sampling", sampling, Sampling)
            check_bool(speculative=speculative)
            check_count("num_beams", num_beams, least=1)
            options = BatchOptions(max_new_tokens, sampling, frozenset(ends), speculative, num_beams)
            rows = prompt_ids(self.tokenizer, prompts)
            self._check(rows, options)
            return (rows, options), {
                "prompts": f"{len(rows)} of {', '.join(str(len(row)) for row in rows)} tokens {digest(rows)}",
                "stop": ends, "max_new_tokens": max_new_tokens, "sampling": sampling, "speculative": speculative,
                "num_beams": num_beams, "device": self.engine.device.type,
            }  # fmt: skip

        self._check_in_step()
        rows, options = check_on_all_ranks(self.comm, "generate", check_arguments, force=True)
        self._progress.begin_call(rows)
        self._batch = None
        iterator = self._generate(rows, options)
        self._iterator = weakref.ref(iterator)
        return iterator

    # Continuous batching.

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        stop: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        min_new_tokens: int = 0,
        logprobs: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        sample: int = 0,
        num_beams: int = 1,
    ) -> Request:
        """A request for an answer to one prompt, which `step` computes together with all others.

        `prompt`, `max_new_tokens`, `sampling` and `stop` are as for `generate`. The answer also ends where its text has
        one of the `stop_strings`, but not before `min_new_tokens` tokens. With `logprobs=n`, tokens come with their
        log-probability by the model and the n most likely tokens. `logits_processors` are functions, such as those of
        Transformers, which change the logits before penalties; all ranks must pass the same. Parallel samples of a
        prompt are requests that differ in the number `sample`: they draw other random numbers, and share the prompt's
        blocks. With `num_beams` above 1, the answer is that of a beam search, which takes as many sequences and returns
        all tokens in its last step. Requests wait while the cache has no room for them. The tokens are those that
        `generate` returns for the prompt alone.
        """

        def check_arguments() -> tuple[tuple[list[int], RequestOptions], SharedValues]:
            self._check_not_running()
            options = RequestOptions.checked(
                self.model, self.tokenizer, max_new_tokens, sampling, stop, stop_strings, min_new_tokens, logprobs,
                logits_processors, sample, num_beams,
            )  # fmt: skip
            ids = one_prompt(self.tokenizer, "prompt", prompt)
            check_prompt(self.model, "prompt", ids, max_new_tokens)
            if len(ids) + num_beams * max_new_tokens > self.engine.cache_tokens:
                of_beams = "" if num_beams == 1 else f" in each of num_beams={num_beams}"
                raise ValueError(
                    f"prompt has {len(ids)} tokens, and max_new_tokens={max_new_tokens} may follow{of_beams}: the "
                    f"cache never holds more than cache_tokens={self.engine.cache_tokens}"
                )
            self._check_beams(num_beams)
            return (ids, options), {"prompt": f"{len(ids)} tokens {digest(ids)}", **options.shared_values}

        self._check_in_step()
        ids, options = check_on_all_ranks(self.comm, "submit", check_arguments, force=True)
        self._progress.begin_call([ids])
        if self._batch is None:
            self._batch = ContinuousBatch(
                self.engine, self._ranks, generator=self._progress.generator, step_tokens=self._step_tokens,
                stats=self.stats, on_logits=self._on_logits,
            )  # fmt: skip
        request = Request(self._submitted, ids, options, self.tokenizer, self._owner)
        self._submitted += 1
        self._batch.submit(request)
        return request

    @property
    def num_unfinished(self) -> int:
        """The number of submitted requests that are not finished."""
        return 0 if self._batch is None else len(self._batch.requests)

    @property
    def num_waiting(self) -> int:
        """The number of submitted requests that wait for room: those that have not begun, or were preempted."""
        return 0 if self._batch is None else len(self._batch.scheduler.waiting)

    def reset_prefix_cache(self) -> None:
        """Forget what is cached of finished prompts and answers; all ranks must call it. Requests in progress go on."""

        def check_arguments() -> tuple[None, SharedValues]:
            self._check_not_running()
            return None, {}

        self._check_in_step()
        check_on_all_ranks(self.comm, "reset_prefix_cache", check_arguments, force=True)
        if self._batch is not None:
            self._batch.forget_finished()
        else:
            self.engine.clear()
        self._update_stats()

    def step(self) -> list[Token]:
        """The next tokens of submitted requests, at most one of each, by their numbers; the same on every rank.

        The tokens of a beam search come all at once, in its last step.

        A request in which an error occurs ends with it, and the others go on. After an exception, such as that of a
        callback, the next step computes all requests again from the tokens that they have, unless the ranks were
        interrupted at different points: then every rank raises CommError.
        """
        self._raise_if_out_of_step("step")
        self._close_complete()
        self._check_not_running()
        if self._batch is None or not self._batch.requests:
            return []
        bytes_before = self.comm.traffic.bytes
        try:
            tokens = self._batch.step()
        except BaseException as error:
            self._report_interruption("step", error)
            raise
        finally:
            self.stats.bytes_sent += self.comm.traffic.bytes - bytes_before
            self._update_stats()
        self._progress.add_step([(token.row, [token.id]) for token in tokens])
        return tokens

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of a request, from its first one on; runs steps, of all requests, while it is in progress.

        Raises the error of a request that ends with one.
        """
        self._check_request(request)
        return self._stream(request)

    def cancel(self, request: Request) -> None:
        """End a request that is not finished; what was computed stays cached for reuse."""

        def check_arguments() -> tuple[None, SharedValues]:
            self._check_not_running()
            self._check_request(request)
            if request.finished:
                raise ValueError(f"request must be in progress, got {request!r}")
            return None, {"request": request.number}

        self._check_in_step()
        check_on_all_ranks(self.comm, "cancel", check_arguments, force=True)
        assert self._batch is not None
        self._batch.cancel(request)

    def _stream(self, request: Request) -> Iterator[Token]:
        at = 0
        while True:
            while at < len(request.tokens):
                yield request.tokens[at]
                at += 1
            if request.finished:
                break
            self.step()
        if request.error is not None:
            raise request.error

    def _check_request(self, request: Request) -> None:
        if not isinstance(request, Request) or request.owner is not self._owner:
            raise ValueError(f"request must be one that submit() of this Generator returned, got {shown(request)}")

    def _checked_step_tokens(self, step_tokens: int | None) -> int:
        sequences, chunk = self.engine.max_sequences, min_prefill_chunk(self.engine.position_ranks.world)
        if step_tokens is None:
            return max(_STEP_TOKENS, sequences + chunk)
        if check_count("step_tokens", step_tokens) < sequences + chunk:
            raise ValueError(
                f"step_tokens must be at least {sequences + chunk}, one for each of {sequences} sequences of a group "
                f"and {chunk} for a chunk of a prompt, got {step_tokens}"
            )
        return step_tokens

    def _check_not_running(self) -> None:
        if self._is_running():
            raise ValueError("another generate() of this Generator is in progress: exhaust or close it first")

    def _all_share_memory(self) -> bool:
        """Whether all ranks exchange small messages through memory. Over sockets tensor parallelism does not pay."""
        own = torch.tensor([self.comm.shares_memory], dtype=torch.int8, device="cpu")
        return all(map(bool, self.comm.all_gather(own, [(1,)] * self.comm.world)))

    def _is_running(self) -> bool:
        """Whether the iterator of the latest call is neither exhausted nor closed nor dropped."""
        latest = None if self._iterator is None else self._iterator()
        return latest is not None and inspect.getgeneratorstate(latest) != inspect.GEN_CLOSED

    def _close_complete(self) -> None:
        """Close an iterator that has returned its last token, as zip() or islice() leave it."""
        latest = None if self._iterator is None else self._iterator()
        if latest is not None and self._progress.is_complete:
            latest.close()

    def _check_in_step(self) -> None:
        """Raise CommError after an interrupted exchange; log how far this rank is, to be compared with the others."""
        self._raise_if_out_of_step("generate")
        self._close_complete()
        if not self._is_running() and not self.num_unfinished:
            self.engine.release_all()  # again, in case that was interrupted, too
        self.comm.note("earlier calls", str(self._progress))
        self._ranks.group.note("cached sequences", self.engine.state())

    def _raise_if_out_of_step(self, operation: str) -> None:
        if self.engine.is_out_of_step:
            raise CommError(
                f"{operation}: an earlier call was interrupted on rank {self.comm.rank} while ranks exchanged "
                "messages: ranks are out of step; start them again, or make a new Generator on a new process group"
            )

    def _generate(self, prompts: list[list[int]], options: BatchOptions) -> abc.Generator[Token, None, None]:
        bytes_before = self.comm.traffic.bytes
        batch = (PromptBatch if options.num_beams == 1 else BeamBatch)(
            self.engine, self._ranks, options, self.tokenizer, self.stats, self._progress, self._on_logits
        )
        try:
            yield from batch.answers(prompts)
        except (GeneratorExit, InvalidLogits):  # closed, or raised on all ranks together
            raise
        except BaseException as error:
            self._report_interruption("generate", error)
            raise
        finally:
            self.stats.bytes_sent += self.comm.traffic.bytes - bytes_before
            self.engine.release_all()
            self._update_stats()

    def _report_interruption(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks, which may wait for this one."""
        if not self.engine.is_out_of_step:
            report_error(self.comm, operation, error)
        elif not isinstance(error, CommError):
            self.comm.fail(f"{operation} was interrupted by {type(error).__name__}: {error}")

    def _check(self, rows: list[list[int]], options: BatchOptions) -> None:
        beams = options.num_beams
        if not 1 <= len(rows) * beams <= self.max_sequences:
            of_beams = "" if beams == 1 else f" of num_beams={beams} sequences each"
            raise ValueError(f"prompts must be 1 to max_sequences={self.max_sequences}, got {len(rows)}{of_beams}")
        new = options.max_new_tokens
        check_positive(max_new_tokens=new)
        if beams > 1 and (options.speculative or not options.sampling.greedy or options.sampling.has_penalties):
            raise ValueError(
                f"num_beams must be 1 with speculative or a sampling that is not greedy or has penalties, got {beams}"
            )
        if beams > 1 and self._on_logits is not None:
            raise ValueError(f"num_beams must be 1 for a Generator with on_logits, got {beams}")
        if options.speculative and (not options.sampling.greedy or options.sampling.has_penalties):
            raise ValueError(
                f"sampling must be greedy (temperature 0), without penalties, with speculative, got {options.sampling}"
            )
        for number, ids in enumerate(rows):
            check_prompt(self.model, f"prompts[{number}]", ids, new)
        # Groups that are computed here only: if one has no room, all ranks raise before any of them starts.
        for group in self._ranks.computed:
            own = [rows[number] for number in self._ranks.rows(len(rows))[group]]
            room = self.engine.max_sequences
            if len(own) * beams > room:  # the beams of a prompt are in one group
                raise ValueError(
                    f"num_beams must be at most {room // len(own)} for {counted(len(own), 'prompt')} in a group of "
                    f"ranks, got {beams}: each of kvdp={self._ranks.kvdp} groups has {room} of "
                    f"max_sequences={self.max_sequences}"
                )
            tokens = [options.max_tokens(len(ids)) for ids in own]
            self.engine.check_room(tokens, self._ranks.in_engine(group), beams)

    def _check_beams(self, num_beams: int) -> None:
        """Raise ValueError unless a request may have so many beams."""
        if num_beams > 1 and self._on_logits is not None:
            raise ValueError(f"num_beams must be 1 for a Generator with on_logits, got {num_beams}")
        room, groups = self.engine.max_sequences, self._ranks.kvdp
        if num_beams > room:
            of_group = "" if groups == 1 else f" in each of kvdp={groups} groups of ranks"
            raise ValueError(
                f"num_beams must be at most {room}, as max_sequences={self.max_sequences} has {room}{of_group}, got "
                f"{num_beams}"
            )

    def _update_stats(self) -> None:
        engine, stats = self.engine, self.stats
        stored = [sequence for sequence in engine.sequences if sequence.stored is not None]
        stats.cached_tokens = sum(len(sequence.local) for sequence in stored)
        held = [engine.kv_bytes(sequence) for sequence in stored]
        stats.kv_bytes, stats.kv_bytes_unsharded = (sum(of_sequence[i] for of_sequence in held) for i in range(2))
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
    num_beams: int = 1,
    sharding: DecodeSharding | None = None,
    storage: str | None = None,
    layout: Layout = Zigzag(),  # noqa: B008  (immutable)
    prefill_chunk: int | None = None,
) -> Iterator[Token]:
    """Tokens for these prompts, as they are generated over the ranks of `comm`: see `Generator`.

    Every rank has the whole model, or its part of a sharded one.

    All ranks must pass the same arguments. Nothing is cached for later prompts: use a `Generator` for that.

    Examples:
        >>> tokens = list(am.generate(model, None, [[1, 2, 3], [4, 5]], max_new_tokens=2, stop=[]))
        >>> [token.row for token in tokens]
        [0, 1, 0, 1]
        >>> def rank(comm):  # the same tokens over any number of ranks
        ...     return list(am.generate(model, None, [[1, 2, 3], [4, 5]], comm, max_new_tokens=2, stop=[]))
        >>> am.run_virtual(2, rank)[1] == tokens
        True
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[list[list[int]], DecodeSharding], SharedValues]:
        check_positive(max_new_tokens=max_new_tokens, num_beams=num_beams)
        check_tokenizer(tokenizer)
        rows = prompt_ids(tokenizer, prompts)
        # For the prompts and not for their beams: those of a prompt are in one group.
        return (rows, _sharding(sharding, sharded_weights(model), max(1, len(rows)), comm)), {}

    rows, chosen = check_on_all_ranks(comm, "generate", check_arguments, force=True)
    per_group = max(1, -(-len(rows) // chosen.kvdp))
    generator = Generator(
        model, tokenizer, comm, max_sequences=per_group * num_beams * chosen.kvdp, sharding=chosen, storage=storage,
        layout=layout,
        cache_tokens=max(1, sum(map(len, rows)) + len(rows) * num_beams * (max_new_tokens + MAX_DECODE_TOKENS)),
        prefill_chunk=prefill_chunk,
    )  # fmt: skip
    return generator.generate(
        rows, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, speculative=speculative,
        num_beams=num_beams,
    )  # fmt: skip


def _sharding(
    sharding: DecodeSharding | None, weights: ShardedWeights | None, sequences: int, comm: Comm
) -> DecodeSharding:
    """The sharding of a `Generator`, which must be that of its model where that is sharded."""
    if sharding is not None:
        check_type("sharding", sharding, DecodeSharding)
    if weights is not None:
        if weights.ranks.all_ranks.world != comm.world or weights.ranks.rank != comm.rank:
            raise ValueError(
                f"comm must have the ranks of the sharded model, {weights.ranks.rank} of "
                f"{weights.ranks.all_ranks.world}, got {comm!r}"
            )
        if sharding not in (None, weights.sharding):
            raise ValueError(f"sharding must be that of the model, {weights.sharding}, or None, got {sharding}")
        return weights.sharding
    chosen = recommended_groups(sequences, comm.world) if sharding is None else sharding
    if chosen.tp != 1 or chosen.ranks != comm.world:
        raise ValueError(
            f"sharding must be kvdp x cp = {comm.world} ranks and tp = 1 for a model that every rank has (shard it "
            f"with load_model or shard_model for more), got {chosen}"
        )
    return chosen


def recommended_groups(sequences: int, ranks: int) -> DecodeSharding:
    """The sharding of so many sequences over ranks that have all weights each."""
    from attnmesh.planner.recommend import recommend_sharding

    # Every rank has all weights, so no kv heads are divided: as with a single kv head.
    return recommend_sharding(sequences, ranks, 1, ranks).choice.sharding


def _subgroup(comm: Comm, members: list[int]) -> Comm:
    return comm if len(members) == comm.world else IndependentSubComm(comm, members)
