"""Prompts on some ranks and answers on others: tokens are those of one process, whatever moves, waits or ends."""

import copy
import itertools
import queue as queues
import socket
import threading
import time

import pytest

for name in ("transformers", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name)

from attnmesh.comm import CommError, IndependentSubComm, SoloComm  # noqa: E402
from attnmesh.generation import engine, rank_memory  # noqa: E402
from attnmesh.generation.generator import Generator  # noqa: E402
from attnmesh.generation.sampling import Sampling  # noqa: E402
from attnmesh.parallel.reshard.room import Room  # noqa: E402
from attnmesh.plan.decode import DecodeSharding  # noqa: E402
from attnmesh.serving.commands import Submission  # noqa: E402
from attnmesh.serving.handover import Channel, DecodeLoop, PrefillLoop, _accept, connect  # noqa: E402
from attnmesh.serving.loop import RequestQueue  # noqa: E402
from attnmesh.serving.server import _own_side  # noqa: E402
from helpers.models import attnmesh_model, check_blocks, random_ids, tiny_tokenizer  # noqa: E402
from helpers.processes import run_processes  # noqa: E402
from helpers.threads import ThreadComm, run_threads  # noqa: E402

SAMPLED = Sampling(1.0, seed=3)
REQUESTS = [
    Submission(0, random_ids(30, 1), 9, Sampling(), stop=[]),
    Submission(0, random_ids(9, 2), 12, SAMPLED, stop=[], logprobs=2),
    Submission(0, random_ids(70, 3), 5, Sampling(presence_penalty=0.5), stop=[], min_new_tokens=2),
    Submission(0, random_ids(5, 4), 1, Sampling(), stop=[]),  # its first token is its last: it never moves
    Submission(0, [20], 7, SAMPLED, stop=[], logit_bias={30: 4.0, 31: -100.0}),
    Submission(0, random_ids(12, 5), 20, SAMPLED, stop_strings=["a", "b", "c"]),
    *(Submission(0, random_ids(21, 6), 8, SAMPLED, stop=[], sample=sample) for sample in range(3)),
]
CACHE, STEP = 120, 40


def small_blocks():
    rank_memory.BLOCK_SIZE = engine.BLOCK_SIZE = 4


def expected(submissions):
    """The tokens of each request alone in one process, and why it ended."""
    found = []
    for each in submissions:
        generator = Generator(attnmesh_model("llama"), tiny_tokenizer(), cache_tokens=CACHE)
        request = each.submit(generator)
        tokens = list(generator.stream(request))
        found.append(([(token.id, token.text, len(token.top_logprobs)) for token in tokens], request.finish_reason))
    return found


class Call:
    """A request of a client, and its events."""

    def __init__(self, queue, submission):
        self._queue, self._events, self.tokens, self.reason = queue, queues.Queue(), [], None
        (self.ticket,) = queue.submit([submission], self._events.put)

    def read(self, tokens=None):
        """Wait for so many tokens, or for the end."""
        while self.reason is None and (tokens is None or len(self.tokens) < tokens):
            event = self._events.get(timeout=60)
            if event.error is not None:
                raise event.error
            if event.token is not None:
                self.tokens.append((event.token.id, event.token.text, len(event.token.top_logprobs)))
            self.reason = event.finish_reason
        return self.tokens, self.reason


def all_at_once(queue):
    calls = [Call(queue, each) for each in REQUESTS]
    return [call.read() for call in calls]


def with_cancelled(queue):
    """One is cancelled while it is decoded, one while it waits for room, one before its prompt is computed."""
    long = Submission(0, random_ids(8, 7), 100, Sampling(), stop=[])
    decoded, kept = (Call(queue, each) for each in (long, REQUESTS[0]))
    decoded.read(3)
    waiting = [Call(queue, long) for _ in range(3)]
    waiting[0].read(1)
    queue.cancel([waiting[0].ticket])
    late = Call(queue, long)
    queue.cancel([late.ticket])
    queue.cancel([decoded.ticket])
    others = [Call(queue, each) for each in REQUESTS[1:3]]
    found = [call.read() for call in (kept, *others)]
    queue.cancel([call.ticket for call in waiting[1:]])
    return found


def both_sides(comm, prefill_ranks, sharding, client, options, lies):
    """A service on these ranks, as `serve` makes it, and what its client found on rank 0."""
    small_blocks()
    prefills = comm.rank < prefill_ranks
    if isinstance(comm, ThreadComm):
        members = range(prefill_ranks) if prefills else range(prefill_ranks, comm.world)
        own = SoloComm() if len(members) == 1 else IndependentSubComm(comm, list(members))
    else:
        own = _own_side(comm, prefill_ranks)
    generator = Generator(
        copy.deepcopy(attnmesh_model("llama")), tiny_tokenizer(), own, step_tokens=STEP,
        sharding=DecodeSharding(cp=prefill_ranks) if prefills else sharding,
        **{"cache_tokens": CACHE, "max_sequences": 2, **options},
    )  # fmt: skip
    channel = connect(comm, prefill_ranks, generator.engine.device)
    if lies:
        Room.num_fitting = lambda room, lengths: len(lengths)
    found, done = [], threading.Event()
    if not prefills:
        DecodeLoop(generator, comm, channel).run()
    else:
        queue = RequestQueue(64) if comm.rank == 0 else None

        def ask():
            try:
                found.append(client(queue))
            except BaseException as error:
                found.append(repr(error))
            done.set()

        if queue is not None:
            threading.Thread(target=ask, daemon=True).start()
        PrefillLoop(
            generator, queue, should_stop=done.is_set, grace=30, all_ranks=comm, channel=channel
        ).run()  # fmt: skip
    for request in list(generator._batch.requests):  # those that were cancelled in the last moment
        generator._batch.cancel(request)
    check_blocks(generator)
    return found, generator.stats


@pytest.mark.parametrize(
    ("prefill_ranks", "sharding", "client", "options", "lies"),
    [
        (1, DecodeSharding(cp=2), all_at_once, {}, False),
        (2, DecodeSharding(kvdp=2), with_cancelled, {}, False),
        pytest.param(2, DecodeSharding(cp=2), all_at_once, {"max_sequences": 6}, False, marks=pytest.mark.slow),
        pytest.param(1, DecodeSharding(kvdp=2), all_at_once, {}, True, marks=pytest.mark.slow),
        pytest.param(1, DecodeSharding(), with_cancelled, {"max_sequences": 1}, False, marks=pytest.mark.slow),
        pytest.param(2, DecodeSharding(), all_at_once, {"storage": "int8"}, False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_process(prefill_ranks, sharding, client, options, lies):
    attnmesh_model("llama")  # before the threads, which would make it at the same time
    run = run_threads
    ranks = run(
        prefill_ranks + sharding.ranks, both_sides, prefill_ranks, sharding, client, options, lies, timeout=120
    )
    asked = REQUESTS if client is all_at_once else REQUESTS[:3]
    found, prefill = ranks[0]
    if "storage" not in options:
        assert found == [expected(asked)]
    assert prefill.decode_steps == 0
    assert prefill.generated_tokens >= len(asked)
    tokens = sum(len(tokens) for tokens, _ in found[0]) - len(asked)
    decoded = [stats for _, stats in ranks[prefill_ranks :: sharding.cp]]
    assert sum(stats.generated_tokens for stats in decoded) >= tokens
    if client is all_at_once:
        assert sum(stats.generated_tokens for stats in decoded) == tokens
        assert sum(stats.prefill_tokens for stats in decoded) == 0


def test_nothing_yet():
    assert itertools and socket and time and CommError and Channel and _accept
