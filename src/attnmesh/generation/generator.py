"""`Generator`: prompts in, tokens out, over any number of ranks.

Sequences are divided among groups of ranks (KVDP), and the ranks of a group shard the positions of each sequence (CP).
Groups prefill and decode independently. After every step they exchange their new tokens, so that every rank yields all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from attnmesh.comm import Comm, CommError, IndependentSubComm, SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.generation.agreement import (
    Progress,
    check_same_weights,
    digest,
    model_values,
    report_error,
)
from attnmesh.generation.batching import BatchRanks, Callbacks, ContinuousBatch
from attnmesh.generation.engine import Engine, min_prefill_chunk
from attnmesh.generation.prompts import check_prompt, check_tokenizer, one_prompt, prompt_ids
from attnmesh.generation.requests import GenerationStats, Request, RequestOptions, SubmitOptions, Token
from attnmesh.generation.sampling import Sampling
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.models.sharded import ShardedWeights, sharded_weights
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.contents import check_movable
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.shards import ScheduleName
from attnmesh.utils.validation import check_bool, check_count, check_positive, check_type, shown

_GREEDY = Sampling()
_STEP_TOKENS = 2048


class _Running:
    """Exists during a step, so that after an interruption it is known whether a step is in progress."""


class Generator:
    """Generates from a model over the ranks of `comm`, and caches sequences for later prompts.

    Every rank has the whole model, or its part of a sharded one (`load_model` with a sharding, `shard_model`).

    The KV cache of a group holds `cache_tokens` tokens, prompts and answers together, of all its sequences;
    `max_sequences` is the size of a batch over all groups. `sharding` is the number of ranks per sequence (cp) and of
    groups (kvdp), by default what `recommend_sharding` returns for `max_sequences` sequences, or the sharding of the
    sharded model. `storage`, fp8, int8 or bfp8, or fp8_ds_mla for latents (DeepSeek), quantizes the cache; by default
    it has the dtype of the model. All tokens, also tokens of the same prompt, attend to quantized keys and values, so
    the answers do not depend on ranks, chunks or prefix reuse. `prefill_chunk` is the most tokens of a prefill pass, by
    default a whole prompt; the first chunk of a prompt is divided over ranks by `layout`, and computed by `schedule`.
    With `reproducible` the logits of a token have the same bits on any number of ranks, in any chunks and
    batches, as in reproducible training; see the page on reproducibility.

    `generate` answers prompts. `submit` takes one request at a time, and `step` computes the next tokens of all
    requests in progress: a group computes at most `step_tokens` tokens per step (default 2048, or more if
    `max_sequences` requires it), so that long prompts do not delay answers. Blocks of finished prompts and answers stay
    cached, and later prompts with the same prefix reuse them.

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
        schedule: ScheduleName = "auto",
        prefill_chunk: int | None = None,
        step_tokens: int | None = None,
        callbacks: Callbacks = Callbacks(),  # noqa: B008  (immutable)
        reproducible: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.comm = model, tokenizer, comm_named("comm", comm)
        self._callbacks = callbacks
        rank = self.comm.rank

        def check_arguments() -> tuple[DecodeSharding, SharedValues]:
            check_positive(cache_tokens=cache_tokens, max_sequences=max_sequences)
            check_bool(reproducible=reproducible)
            check_tokenizer(tokenizer)
            check_type("callbacks", callbacks, Callbacks)
            for name, callback in callbacks._asdict().items():
                if callback is not None and not callable(callback):
                    raise ValueError(f"callbacks.{name} must be a function or None, got {shown(callback)}")
            weights = sharded_weights(model)
            chosen = _sharding(sharding, weights, max_sequences, self.comm)
            if weights is None:
                group, across = (
                    _subgroup(self.comm, each) for each in (chosen.cp_peers(rank), chosen.kvdp_peers(rank))
                )
                self._ranks = BatchRanks(group, across, chosen.kvdp)
            else:
                group = weights.ranks.all_ranks
                self._ranks = BatchRanks(self.comm, _subgroup(self.comm, [rank]), chosen.kvdp, together=True)
            self.engine = Engine(
                model, chosen, rank, group, weights, cache_tokens=cache_tokens, max_sequences=max_sequences,
                storage=storage, layout=layout, schedule=schedule, prefill_chunk=prefill_chunk,
                reproducible=reproducible,
            )  # fmt: skip
            self._step_tokens = self._checked_step_tokens(step_tokens)
            return chosen, {
                "cache_tokens": cache_tokens, "max_sequences": max_sequences, "sharding": repr(chosen),
                "storage": self.engine.storage, "layout": layout, "schedule": schedule,
                "prefill_chunk": prefill_chunk, "step_tokens": step_tokens, "reproducible": reproducible,
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
        if (
            self.engine.device.type == "cpu" and sharded_weights(model) is None and self._all_share_memory()
            and not self.engine.calls.recurrent and not reproducible
        ):  # fmt: skip
            self.engine.use_tensor_parallel()
        self.max_sequences, self.stats = max_sequences, GenerationStats(rank)
        self._progress = Progress(self.comm.log.number("Generator"))
        self._batch = ContinuousBatch(
            self.engine, self._ranks, generator=self._progress.generator, stats=self.stats, callbacks=self._callbacks
        )
        self._submitted = 0
        self._running: weakref.ref[_Running] | None = None  # while a step is in progress
        self._dropped: list[Request] = []  # to be cancelled after a step: of iterators that were closed within it
        self._calls: list[tuple[weakref.ref[Iterator[Token]], list[Request]]] = []  # of generate, in progress
        self._owner = object()  # of requests: without a reference to this

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        stop: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        speculative: bool = False,
        num_beams: int = 1,
    ) -> Iterator[Token]:
        """Tokens as they are generated, row by row within a step, the same on every rank.

        A prompt is text, or its token ids. A row ends with one of the `stop` tokens, by default the eos tokens of the
        model's generation config, where its text has one of the `stop_strings`, or after `max_new_tokens`. With
        `speculative`, tokens are drafted by prompt lookup and several are verified per step: fewer steps, the same
        tokens. `stats` counts the accepted ones. With `num_beams` above 1, the answer is the best that a beam search
        finds, and tokens come at its end: each beam of a row is a sequence, and all share the prompt.

        It submits the prompts as requests, when its first token is taken, and runs steps until all are answered:
        prompts beyond `max_sequences`, or what the cache holds at a time, wait. Closing or dropping the iterator
        cancels them. An error of a row, such as logits that give no probabilities (NaN, +inf, or -inf only), is raised.
        After an exception the generator works on, unless the ranks were interrupted at different points: then every
        rank raises CommError.
        """

        def check_arguments() -> tuple[list[Request], SharedValues]:
            rows = prompt_ids(self.tokenizer, prompts)
            if not rows:
                raise ValueError(f"prompts must have at least one prompt, got {shown(prompts)}")
            of_all = RequestOptions(
                max_new_tokens, sampling, stop, stop_strings, num_beams=num_beams, speculative=speculative
            )
            options = [replace(of_all, sample=row).checked(self.model, self.tokenizer) for row in range(len(rows))]
            for row, ids in enumerate(rows):
                self._check_prompt(f"prompts[{row}]", ids, options[row])
            requests = [
                Request(self._submitted + row, ids, of_row, self.tokenizer, self._owner, row)
                for row, (ids, of_row) in enumerate(zip(rows, options, strict=True))
            ]
            lengths = f"{len(rows)} of {', '.join(str(len(row)) for row in rows)} tokens {digest(rows)}"
            return requests, {"prompts": lengths, **options[0].shared_values, "device": self.engine.device.type}

        self._check_in_step()
        requests = check_on_all_ranks(self.comm, "generate", check_arguments, force=True)
        self._progress.begin_call([request.prompt for request in requests])
        self._submitted += len(requests)  # numbered here: ranks that take their first tokens in another order are told
        iterator = self._generate(requests)
        self._calls.append((weakref.ref(iterator), requests))
        return iterator

    def _generate(self, requests: list[Request]) -> Iterator[Token]:
        self._raise_if_out_of_step("generate")
        self._check_no_callback()
        try:
            for request in requests:
                self._batch.submit(request)
            taken = [0] * len(requests)
            while True:
                for request in requests:  # also of a step that another call has run
                    if request.error is not None:
                        raise request.error
                    if request.finish_reason == "moved":
                        raise RuntimeError(f"{request.name} goes on in another Generator: see move_requests")
                behind = [row for row, request in enumerate(requests) if taken[row] < len(request.tokens)]
                for row in behind:
                    yield requests[row].tokens[taken[row]]
                    taken[row] += 1
                if all(request.finished for request in requests) and not behind:
                    return
                if not behind:
                    self._step("generate", self.engine.cache_tokens + self.engine.max_sequences)
        finally:
            self._cancel_all(requests)

    def _cancel_all(self, requests: list[Request]) -> None:
        """Cancel the unfinished requests of a call of generate; after the step, if one is in progress."""
        if self._is_in_step:
            self._dropped += requests
            return
        for request in requests:
            if request in self._batch.requests and not self.engine.is_out_of_step:
                self._batch.cancel(request)

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
        num_beams: int = 1,
        speculative: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Request:
        """A request for an answer to one prompt, which `step` computes together with all others.

        `prompt`, `max_new_tokens`, `sampling`, `stop`, `stop_strings` and `speculative` are as for `generate`. The
        answer does not end before `min_new_tokens` tokens. With `logprobs=n`, tokens come with their log-probability by
        the model and the n most likely tokens; with `prompt_logprobs=n` the request has these for its prompt, too,
        which then reuses no cached tokens. `logits_processors` are functions, such as the processors of Transformers,
        which change the logits before penalties; all ranks must pass the same. `grammar`, in llguidance's format
        (`LLMatcher.grammar_from_json_schema` and others; extra `serve`), decides which tokens can follow. Parallel
        samples of a prompt are requests that differ in the number `sample`: they draw other random numbers, and share
        the prompt's blocks. With `num_beams` above 1, the answer is the result of a beam search, which takes
        `num_beams` sequences and returns all tokens in its last step. Requests wait while the cache has no room for
        them; those with a lower `priority` come first. Special tokens have text if `skip_special_tokens` is False,
        except stop tokens. The tokens are the same that `generate` returns for the prompt alone.
        """

        for name in options.keys() - SubmitOptions.__annotations__.keys():
            raise TypeError(f"submit() got an unexpected keyword argument {name!r}")

        def check_arguments() -> tuple[tuple[list[int], RequestOptions], SharedValues]:
            given = RequestOptions(
                max_new_tokens, sampling, stop, stop_strings, min_new_tokens, logprobs, num_beams=num_beams,
                speculative=speculative, **options,
            ).checked(self.model, self.tokenizer)  # fmt: skip
            ids = one_prompt(self.tokenizer, "prompt", prompt)
            self._check_prompt("prompt", ids, given)
            return (ids, given), {"prompt": f"{len(ids)} tokens {digest(ids)}", **given.shared_values}

        self._check_in_step()
        ids, given = check_on_all_ranks(self.comm, "submit", check_arguments, force=True)
        self._progress.begin_call([ids])
        request = Request(self._submitted, ids, given, self.tokenizer, self._owner)
        self._submitted += 1
        self._batch.submit(request)
        return request

    def _check_prompt(self, name: str, ids: list[int], options: RequestOptions) -> None:
        """Raise ValueError unless the model and the cache can take a prompt with these options."""
        check_prompt(self.model, name, ids, options.max_new_tokens)
        beams, new = options.num_beams, options.max_new_tokens
        if len(ids) + beams * new > self.engine.cache_tokens:
            of_beams = "" if beams == 1 else f" in each of num_beams={beams}"
            raise ValueError(
                f"{name} has {len(ids)} tokens, and max_new_tokens={new} may follow{of_beams}: the cache never holds "
                f"more than cache_tokens={self.engine.cache_tokens}"
            )
        if beams > 1 and self._callbacks.on_logits is not None:
            raise ValueError(f"num_beams must be 1 for a Generator with on_logits, got {beams}")
        room, groups = self.engine.max_sequences, self._ranks.kvdp
        if beams > room:
            of_group = "" if groups == 1 else f" in each of kvdp={groups} groups of ranks"
            raise ValueError(
                f"num_beams must be at most {room}, as max_sequences={self.max_sequences} has {room}{of_group}, got "
                f"{beams}"
            )

    @property
    def requests(self) -> list[Request]:
        """The requests that are not finished, including requests of `generate`."""
        return list(self._batch.requests)

    @property
    def num_unfinished(self) -> int:
        """The number of these requests."""
        return len(self._batch.requests)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for room: not begun, or preempted."""
        return len(self._batch.scheduler.waiting)

    def reset_prefix_cache(self) -> None:
        """Forget cached keys and values of finished requests; all ranks must call it. Requests in progress continue."""

        self._check_in_step()
        check_on_all_ranks(self.comm, "reset_prefix_cache", lambda: (None, {}), force=True)
        self._batch.forget_finished()

    def step(self) -> list[Token]:
        """The next tokens of submitted requests, by their numbers; the same on every rank.

        Calls of `generate` in progress go on, too: their iterators return their tokens.

        It is at most one of each, and more where drafts are accepted. The tokens of a beam search come all at once, in
        its last step.

        A request in which an error occurs ends with it, and the others go on. After an exception, such as the exception
        of a callback, the next step computes all requests again from the tokens that they have, unless the ranks were
        interrupted at different points: then every rank raises CommError.
        """
        self._raise_if_out_of_step("step")
        submitted = [(request, len(request.tokens)) for request in self._batch.requests if request.row is None]
        if self._batch.requests:
            self._step("step", self._step_tokens)
        return [token for request, before in submitted for token in request.tokens[before:]]

    def _step(self, operation: str, step_tokens: int) -> None:
        self._check_no_callback()
        bytes_before = self.comm.traffic.bytes
        running = _Running()
        try:
            self._running = weakref.ref(running)
            tokens = self._batch.step(step_tokens)
        except BaseException as error:
            self._report_interruption(operation, error)
            raise
        finally:
            self._running = None
            self._cancel_all(self._dropped)
            self._dropped = []
            self.stats.bytes_sent += self.comm.traffic.bytes - bytes_before
        if self.comm.world > 1:
            self._progress.add_step([(token.row, [token.id]) for token in tokens])

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of a request, from its first token on; runs steps, of all requests, while it is in progress.

        Raises the error of a request that ends with one.
        """
        self._check_request(request)
        return self._stream(request)

    def cancel(self, request: Request) -> None:
        """End a request that is not finished; its keys and values stay cached for reuse."""

        def check_arguments() -> tuple[None, SharedValues]:
            self._check_request(request)
            if request.finished:
                raise ValueError(f"request must be in progress, got {request!r}")
            return None, {"request": request.number}

        self._check_in_step()
        check_on_all_ranks(self.comm, "cancel", check_arguments, force=True)
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

    # Requests that continue on other ranks: see `moving`.

    def states(self, requests: Sequence[Request] | None = None) -> list[dict[str, Any]]:
        """Requests in progress, by default all, as JSON, each with the `row` of its sequence in the cache, or -1.

        Beam searches begin again: their sequences are freed. Raises ValueError if a request cannot be moved.
        """
        self._check_in_step()
        self.check_moves()
        self._batch.settle()
        chosen = self._batch.requests if requests is None else list(requests)
        for each in chosen:
            self._check_request(each)
            if each.finished or chosen.count(each) > 1:
                raise ValueError(f"requests must be in progress, each once, got {shown(requests)}")
        states = [request.to_json() for request in chosen]
        self._batch.restart_searches(chosen)
        rows = [each.sequences[0].row if each.sequences else -1 for each in chosen]
        return [{**state, "row": row} for state, row in zip(states, rows, strict=True)]

    @property
    def progress(self) -> str:
        """How far it is: equal on all its ranks, or they are out of step."""
        return f"{self._progress}, {self.engine.state()}"

    def check_moves(self) -> None:
        """Raise ValueError if requests cannot continue on other ranks, or their cache cannot be moved there."""
        check_movable("cache", self.engine.cache)

    def check_adopts(self) -> None:
        """Raise ValueError unless requests of another generator can continue in this generator."""
        self._check_in_step()
        self.check_moves()
        self._batch.settle()  # or what joins the cache would be freed with what was interrupted
        if any(request.options.num_beams > 1 for request in self._batch.requests):
            raise ValueError(f"target must have no beam search in progress, got {self._batch.requests}")

    def requests_from(self, states: Sequence[dict[str, Any]]) -> list[Request]:
        """Requests for this generator, which do not run yet; raises ValueError for a request that it cannot hold."""
        requests = [
            Request.from_json(state, self._submitted + at, self.model, self.tokenizer, self._owner)
            for at, state in enumerate(states)
        ]
        for at, request in enumerate(requests):
            self._check_prompt(f"requests[{at}]", request.prompt, request.options)
        return requests

    def adopt(self, requests: Sequence[Request], sequences: Sequence[CacheSequence | None]) -> None:
        """Continue requests whose sequences are in the cache; requests without a sequence wait."""
        self._submitted += len(requests)
        for request, sequence in zip(requests, sequences, strict=True):
            if sequence is None:
                self._batch.submit(request)
            else:
                self._batch.adopt(request, sequence)

    def end_moved(self, requests: Sequence[Request] | None = None) -> None:
        """End requests, by default all, which continue in another generator."""
        for request in list(self._batch.requests if requests is None else requests):
            self._batch.cancel(request, "moved")

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

    def _all_share_memory(self) -> bool:
        """Whether all ranks exchange small messages through memory. Over sockets tensor parallelism does not pay."""
        own = torch.tensor([self.comm.shares_memory], dtype=torch.int8, device="cpu")
        return all(map(bool, self.comm.all_gather(own, [(1,)] * self.comm.world)))

    def _check_in_step(self) -> None:
        """Raise CommError after an interrupted exchange; log how far this rank is, to be compared with the others."""
        self._raise_if_out_of_step("generate")
        self._check_no_callback()
        for iterator, requests in self._calls:  # again, in case that was interrupted, too
            if iterator() is None:
                self._cancel_all(requests)
        self._calls = [call for call in self._calls if call[0]() is not None]
        self.comm.note("earlier calls", str(self._progress))
        self.comm.note("cached sequences", self.engine.state())

    @property
    def _is_in_step(self) -> bool:
        return self._running is not None and self._running() is not None

    def _check_no_callback(self) -> None:
        """Raise ValueError within a step: a function of the caller may not call the generator that calls it."""
        if self._is_in_step:
            raise ValueError("a callback must not call the Generator that calls it: a step is in progress")

    def _raise_if_out_of_step(self, operation: str) -> None:
        if self.engine.is_out_of_step:
            raise CommError(
                f"{operation}: an earlier call was interrupted on rank {self.comm.rank} while ranks exchanged "
                "messages: ranks are out of step; start them again, or make a new Generator on a new process group"
            )

    def _report_interruption(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks, which may wait for this rank."""
        if not self.engine.is_out_of_step:
            report_error(self.comm, operation, error)
        elif not isinstance(error, CommError):
            self.comm.fail(f"{operation} was interrupted by {type(error).__name__}: {error}")


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
    prefill_chunk: int | None = None,
    reproducible: bool = False,
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
        # For the prompts and not for their beams: the beams of a prompt are in one group.
        return (rows, _sharding(sharding, sharded_weights(model), max(1, len(rows)), comm)), {}

    rows, chosen = check_on_all_ranks(comm, "generate", check_arguments, force=True)
    per_group = max(1, -(-len(rows) // chosen.kvdp))
    generator = Generator(
        model, tokenizer, comm, max_sequences=per_group * num_beams * chosen.kvdp, sharding=chosen, storage=storage,
        cache_tokens=max(1, sum(map(len, rows)) + len(rows) * num_beams * max_new_tokens),
        prefill_chunk=prefill_chunk, reproducible=reproducible,
    )  # fmt: skip
    return generator.generate(
        rows, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, speculative=speculative,
        num_beams=num_beams,
    )  # fmt: skip


def _sharding(
    sharding: DecodeSharding | None, weights: ShardedWeights | None, sequences: int, comm: Comm
) -> DecodeSharding:
    """The sharding of a `Generator`, which must be the sharding of its model if the model is sharded."""
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
    """The sharding of this many sequences over ranks that have all weights each."""
    from attnmesh.planner.recommend import recommend_sharding

    # Every rank has all weights, so no kv heads are divided: as with a single kv head.
    return recommend_sharding(sequences, ranks, 1, ranks).choice.sharding


def _subgroup(comm: Comm, members: list[int]) -> Comm:
    return comm if len(members) == comm.world else IndependentSubComm(comm, members)
