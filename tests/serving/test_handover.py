"""Prompts on some ranks and answers on others: tokens are those of one process, whatever moves, waits or ends."""

import copy
import queue as queues
import socket
import threading
import time
from functools import cache

import pytest
import torch

for name in ("transformers", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name)

from attnmesh.comm import CommError, IndependentSubComm, SoloComm  # noqa: E402
from attnmesh.generation.generator import Generator  # noqa: E402
from attnmesh.generation.sampling import Sampling  # noqa: E402
from attnmesh.kv_cache.pools import CacheSpec  # noqa: E402
from attnmesh.kv_cache.sharded import ShardedCache  # noqa: E402
from attnmesh.parallel.reshard.goal import Room, room_of  # noqa: E402
from attnmesh.plan.decode import DecodeSharding  # noqa: E402
from attnmesh.serving.handover import Channel, DecodeLoop, PrefillLoop, _accept, connect  # noqa: E402
from attnmesh.serving.loop import RequestQueue, Submission  # noqa: E402
from attnmesh.serving.server import _own_side  # noqa: E402
from helpers import recurrent_models  # noqa: E402
from helpers.cases import sweep  # noqa: E402
from helpers.models import (  # noqa: E402
    VOCABULARY,
    attnmesh_model,
    check_blocks,
    random_ids,
    tiny_tokenizer,
    use_small_blocks,
)
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


@cache
def model_of(kind):
    if kind not in recurrent_models.MODELS:
        return attnmesh_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return recurrent_models.recurrent_model(kind, vocab_size=VOCABULARY).eval()


def expected(submissions, kind):
    """The tokens of each request alone in one process, and why it ended."""
    found = []
    for each in submissions:
        generator = Generator(model_of(kind), tiny_tokenizer(), cache_tokens=CACHE)
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


def two_that_outgrow_the_cache(queue):
    calls = [Call(queue, each) for each in OUTGROWING]
    return [call.read() for call in calls]


OUTGROWING = [Submission(0, random_ids(20, seed), 60, SAMPLED, stop=[]) for seed in (8, 9)]
ASKED = {all_at_once: REQUESTS, with_cancelled: REQUESTS[:3], two_that_outgrow_the_cache: OUTGROWING}


def leaves_one(queue):
    """Go while an answer is computed."""
    return Call(queue, Submission(0, random_ids(8, 7), 100, Sampling(), stop=[])).read(3)


def both_sides(comm, prefill_ranks, sharding, client, options, kind="llama"):
    """A service on these ranks, as `serve` makes it; what its client found, and what each rank has done."""
    prefills, grace = comm.rank < prefill_ranks, options.get("grace", 30)
    if isinstance(comm, ThreadComm):
        members = list(range(prefill_ranks) if prefills else range(prefill_ranks, comm.world))
        own = SoloComm() if len(members) == 1 else IndependentSubComm(comm, members)
    else:
        own = _own_side(comm, prefill_ranks)
    generator = Generator(
        copy.deepcopy(model_of(kind)), tiny_tokenizer(), own, step_tokens=STEP,
        sharding=DecodeSharding(cp=prefill_ranks) if prefills else sharding,
        cache_tokens=CACHE, max_sequences=options.get("max_sequences", 2),
    )  # fmt: skip
    channel = connect(comm, prefill_ranks, generator.engine.device)
    if not prefills:
        DecodeLoop(generator, comm, channel).run()
        check_blocks(generator)
        return None, generator.stats
    queue, found, done = RequestQueue(64), [], threading.Event()

    def ask():
        try:
            found.append(client(queue))
        except BaseException as error:
            found.append(repr(error))
        done.set()

    if comm.rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    how = {"should_stop": done.is_set, "grace": grace, "all_ranks": comm, "channel": channel}
    PrefillLoop(generator, queue if comm.rank == 0 else None, **how).run()
    check_blocks(generator)
    return (found or [None])[0], generator.stats


def check(ranks, prefill_ranks, sharding, client, kind="llama"):
    (found, prefill), *_ = ranks
    asked = ASKED[client]
    assert found == expected(asked, kind)
    if kind not in recurrent_models.MODELS:  # else the last token of a prompt, behind a kept state, may be a step
        assert prefill.decode_steps == 0
    decode = [stats for _, stats in ranks[prefill_ranks :: sharding.cp]]  # one of each group
    new = sum(len(tokens) for tokens, _ in found) - len(asked)  # the first ones come with the prompts
    if client is with_cancelled:
        assert sum(each.generated_tokens for each in decode) > new
    else:
        assert sum(each.generated_tokens for each in decode) == new
        assert prefill.generated_tokens == len(asked)
    preemptions, again = (sum(getattr(each, x) for each in decode) for x in ("preemptions", "prefill_tokens"))
    assert (preemptions > 0) == (again > 0) == (client is two_that_outgrow_the_cache)


def check_threads(monkeypatch, prefill_ranks, sharding, client, kind="llama"):
    use_small_blocks(monkeypatch)
    model_of(kind)  # before the threads, which would make it at the same time
    how = prefill_ranks, sharding, client
    check(run_threads(prefill_ranks + sharding.ranks, both_sides, *how, {}, kind), *how, kind)


@pytest.mark.sweep
def test_nine_requests_with_room_for_two(monkeypatch):
    check_threads(monkeypatch, 1, DecodeSharding(cp=2), all_at_once)


def test_requests_that_are_cancelled_do_not_disturb_others(monkeypatch):
    check_threads(monkeypatch, 2, DecodeSharding(kvdp=2), with_cancelled)


def test_requests_that_are_preempted_are_computed_again_on_the_decode_ranks(monkeypatch):
    check_threads(monkeypatch, 1, DecodeSharding(), two_that_outgrow_the_cache)


@pytest.mark.parametrize(
    ("prefill_ranks", "sharding", "client", "kind"),
    [
        (2, DecodeSharding(kvdp=2), with_cancelled, "lfm2"),
        sweep(1, DecodeSharding(cp=2), all_at_once, "granitemoehybrid"),
        sweep(1, DecodeSharding(), two_that_outgrow_the_cache, "qwen3_5_text"),
    ],
)
def test_states_of_recurrent_layers_move(monkeypatch, prefill_ranks, sharding, client, kind):
    check_threads(monkeypatch, prefill_ranks, sharding, client, kind)


@pytest.mark.sweep
def test_layers_with_windows(monkeypatch):
    """A server has blocks for all tokens in every layer, so that they move."""
    check_threads(monkeypatch, 2, DecodeSharding(cp=2), all_at_once, "mistral")


def test_the_end_does_not_wait_for_answers_longer_than_the_grace(monkeypatch):
    use_small_blocks(monkeypatch)
    attnmesh_model("llama")
    step = Generator.step
    monkeypatch.setattr(Generator, "step", lambda generator: time.sleep(0.02) or step(generator))  # 2 s for all tokens
    (_, prefill), (_, decode) = run_threads(2, both_sides, 1, DecodeSharding(), leaves_one, {"grace": 0})
    assert prefill.generated_tokens == 1
    assert 2 <= decode.generated_tokens < 99


def test_requests_that_find_no_room_after_all_come_again(monkeypatch):
    honest, too_many = Room.num_fitting, []

    def num_fitting(room, lengths):
        too_many.append(len(lengths) - honest(room, lengths))
        return len(lengths)

    monkeypatch.setattr(Room, "num_fitting", num_fitting)
    check_threads(monkeypatch, 1, DecodeSharding(kvdp=2), all_at_once)
    assert max(too_many) > 0


def on_process(comm, *how):
    with pytest.MonkeyPatch.context() as patch:
        use_small_blocks(patch)
        return both_sides(comm, *how)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("prefill_ranks", "sharding", "client", "options"),
    [
        (2, DecodeSharding(kvdp=2), all_at_once, {}),
        (1, DecodeSharding(cp=2), with_cancelled, {"max_sequences": 3}),
        (2, DecodeSharding(cp=2), two_that_outgrow_the_cache, {}),
        (2, DecodeSharding(), all_at_once, {"max_sequences": 6}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_service_over_gloo(prefill_ranks, sharding, client, options):
    how = prefill_ranks, sharding, client, options
    check(run_processes(prefill_ranks + sharding.ranks, on_process, *how, timeout=200), *how[:3])


# The channel, and the ends of ranks.


def channels():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return Channel(socket.create_connection(listening.getsockname())), Channel(listening.accept()[0])


def test_the_end_of_the_other_side_ends_a_loop():
    ours, theirs = channels()
    generator = Generator(attnmesh_model("llama"), cache_tokens=40)
    queue = RequestQueue(4)
    call = Call(queue, Submission(0, [8, 9], 30, Sampling(), stop=[]))
    theirs.close()
    with pytest.raises(CommError, match=r"the decode ranks have ended: .*other end of the channel has ended"):
        PrefillLoop(
            generator, queue, should_stop=lambda: False, grace=0, all_ranks=SoloComm(), channel=ours
        ).run()  # fmt: skip
    with pytest.raises(RuntimeError, match="the server has failed: CommError"):
        call.read()
    ours, theirs = channels()
    theirs.close()
    with pytest.raises(CommError, match="other end of the channel has ended"):
        DecodeLoop(generator, SoloComm(), ours).run()


def test_errors_and_log_probabilities_pass_through_the_channel():
    ours, theirs = channels()
    queue = RequestQueue(4)
    calls = [Call(queue, each) for each in REQUESTS[:2]]
    generator = Generator(attnmesh_model("llama"), cache_tokens=40)
    loop = PrefillLoop(generator, queue, should_stop=lambda: False, grace=0, all_ranks=SoloComm(), channel=ours)
    threading.Thread(target=loop._receive, daemon=True).start()
    token = {"row": 5, "id": 9, "text": "x", "logprob": -0.5, "top_logprobs": [(9, -0.5), (8, -1.0)]}
    theirs.send(tokens=[(0, [token, token], "stop", None, 3), (1, [], "error", "request 1: no room", 0)])
    assert calls[0].read() == ([(9, "x", 2)] * 2, "stop")
    with pytest.raises(RuntimeError, match="request 1: no room"):
        calls[1].read()
    theirs.close()


def test_a_connection_without_the_key_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        wrong = socket.create_connection(address)
        wrong.sendall(b"0" * 8)
        silent = socket.create_connection(address)
        silent.shutdown(socket.SHUT_WR)
        right = socket.create_connection(address)
        right.sendall(b"k" * 8)
        ours, theirs = _accept(listening, b"k" * 8, time.monotonic() + 10), Channel(right)
        assert wrong.recv(1) == silent.recv(1) == b""
        theirs.send(stop=True)
        assert ours.receive() == {"stop": True}
        with pytest.raises(CommError, match="the first decode rank did not connect to rank 0"):
            _accept(listening, b"k" * 8, time.monotonic() + 0.05)
        wrong.close()
        silent.close()


@pytest.mark.parametrize(
    ("sharding", "taken", "lengths", "fitting"),
    [
        (DecodeSharding(), [], [26, 26], 2),  # 7 blocks each, and one to go on
        (DecodeSharding(), [20], [26, 9], 1),  # 5 + 8 blocks leave 3 for 3 and one
        (DecodeSharding(), [], [64], 1),  # an empty cache takes what it can hold
        (DecodeSharding(kvdp=2), [40], [50, 50, 4], 1),  # each group has 16 blocks
        (DecodeSharding(cp=2), [], [4] * 9, 6),  # rows
        (DecodeSharding(), [60], [1], 0),
    ],
    ids=str,
)
def test_the_number_of_sequences_that_there_is_room_for(sharding, taken, lengths, fitting):
    """As many as `Room.goal` places, less those that could not grow."""
    cache = ShardedCache(
        sharding,
        0,
        CacheSpec(layers=1, kv_heads=1, head_dim=16),
        batch=6,
        num_blocks=16,
        block_size=4,
        device="cpu",
        max_length=64,
    )
    for length in taken:
        cache.mark_written(cache.append([cache.allocate(length)], length))
    assert room_of(cache).num_fitting(lengths) == fitting
