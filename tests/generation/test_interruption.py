"""A call that is interrupted or left at any point: the next one gives the right tokens, or all raise CommError."""

import sys
import threading
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnmesh.generation
import attnmesh.kv_cache
from attnmesh.comm import CommError, comm_from
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import InvalidLogits, Sampling
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import sweep
from helpers.models import OneLayer, check_blocks, generated_rows, on_virtual_ranks, random_ids, use_small_blocks
from helpers.processes import run_processes

PROMPTS = [random_ids(n, seed, high=30) * 3 for n, seed in ((11, 1), (9, 2))]
MOST = 5
NEXT = [[*PROMPTS[0][:25], 9, 9], PROMPTS[1]]  # shares a prefix with what was interrupted


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


class Interrupt(Exception):  # noqa: N818
    """What a callback raises."""


@cache
def model():
    return OneLayer()


@cache
def uninterrupted(prompt, most):
    """The tokens of one rank that computes the whole prompt at once."""
    generator = Generator(model(), None, cache_tokens=100)
    return generated_rows(generator, [list(prompt)], max_new_tokens=most)[0]


def expected_rows(prompts, most=MOST):
    return [uninterrupted(tuple(prompt), most) for prompt in prompts]


def make(comm=None, sharding=None, **callbacks):
    # Room for the two prompts, and no more: what an interrupted call keeps would be missing.
    return Generator(
        model(), None, comm, cache_tokens=100, max_sequences=2,
        sharding=sharding, prefill_chunk=12, **callbacks,
    )  # fmt: skip


def check_next(generator):
    assert generated_rows(generator, NEXT, max_new_tokens=MOST) == expected_rows(NEXT)
    assert generator.num_unfinished == 0
    check_blocks(generator)


def raise_at(count, error):
    """A callback that raises when it is called for the `count`-th time, and never again."""
    calls = iter(range(count + 1))

    def callback(*_):
        if next(calls, None) == count:
            raise error

    return callback


# One rank.


@pytest.mark.parametrize(("where", "error"), [("on_prefill", KeyboardInterrupt()), ("on_logits", Interrupt("stop"))])
def test_after_an_exception_of_a_callback_the_next_call_works(where, error):
    calls = {"on_prefill": 6, "on_logits": 2 * MOST}[where]
    for at in range(calls):
        generator = make(callbacks=Callbacks(**{where: raise_at(at, error)}))
        with pytest.raises(type(error)):
            generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=())
        check_next(generator)


def test_after_an_exception_of_the_model_the_next_call_works():
    for at in range(6 + MOST - 1):
        error = torch.OutOfMemoryError("no memory") if at % 2 else KeyboardInterrupt()
        generator = make()
        with model().embedding.register_forward_hook(raise_at(at, error)):
            with pytest.raises(type(error)):
                generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=())
            check_next(generator)


@pytest.mark.parametrize("how", ["closed", sweep("dropped"), sweep("raised in the loop")])
def test_an_iterator_that_is_left_at_any_token_leaves_the_generator_usable(how):
    def rank(comm):
        generator = make(comm)
        for count in (0, 1, 4, 2 * MOST - 1, 2 * MOST):
            tokens = generator.generate(PROMPTS, max_new_tokens=MOST, stop=())
            for _ in range(count):
                next(tokens)
            if how == "closed":
                tokens.close()
            elif how == "raised in the loop":
                with suppress(Interrupt):
                    for _ in tokens:
                        raise Interrupt
            del tokens
            check_next(generator)

    on_virtual_ranks(2, rank)


def test_tokens_of_finished_passes_stay_cached():
    generator = make(callbacks=Callbacks(on_prefill=raise_at(2, Interrupt())))
    with pytest.raises(Interrupt):
        list(generator.generate(PROMPTS[:1], max_new_tokens=MOST))
    assert generated_rows(generator, PROMPTS[:1], max_new_tokens=MOST) == expected_rows(PROMPTS[:1])
    assert generator.stats.reused_tokens == 24  # of two passes; the third was interrupted


# A KeyboardInterrupt comes at any line.

_FOLDERS = tuple(str(Path(package.__file__).parent) for package in (attnmesh.generation, attnmesh.kv_cache))


class InterruptedLine:
    """Raises KeyboardInterrupt at the `at`-th line that this thread runs in `generation` and `kv_cache`."""

    def __init__(self, at):
        self._left, self.where = at, None

    def __enter__(self):
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter_function(self, frame, event, _):
        return self._line if frame.f_code.co_filename.startswith(_FOLDERS) else None

    def _line(self, frame, event, _):
        if event == "line":
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def interrupted_at(line, generator, speculative=False):
    """The line where the call was interrupted; None if it ended before that many lines."""
    with InterruptedLine(line) as interrupted, suppress(KeyboardInterrupt, CommError):
        generated_rows(generator, PROMPTS, max_new_tokens=3, stop=(), speculative=speculative)
    return interrupted.where


def check_every_line(step):
    generator, tried, line = make(), 0, 1
    while (where := interrupted_at(line, generator, speculative=line % 2 == 0)) is not None:
        try:
            check_next(generator)
        except BaseException as error:
            error.add_note(f"after an interruption at line {line}, {where}")
            raise
        tried, line = tried + 1, line + step
    return tried


def test_after_a_keyboard_interrupt_at_some_line_the_next_call_works():
    assert check_every_line(step=197) > 10


@pytest.mark.sweep
def test_after_a_keyboard_interrupt_at_many_lines_the_next_call_works():
    assert check_every_line(step=13) > 100


def stepped(generator, interruption):
    """The answers to three requests, two of which come late; a step that is interrupted is followed by another.

    The last one is a beam search.
    """
    handles = [generator.submit(PROMPTS[0], max_new_tokens=3, stop=(), sampling=Sampling(1.0, seed=3))]
    while generator.num_unfinished:
        with suppress(KeyboardInterrupt), interruption:
            generator.step()
        if len(handles) == 1:
            handles += [
                generator.submit(prompt, max_new_tokens=2 * beams, stop=(), num_beams=beams)
                for prompt, beams in zip(NEXT, (1, 2), strict=True)
            ]
    return [handle.ids for handle in handles]


def check_every_line_of_steps(step):
    expected = stepped(make(), InterruptedLine(0))
    generator, tried, line = make(), 0, 1
    while True:
        interruption = InterruptedLine(line)
        found = stepped(generator, interruption)
        assert found == expected, f"after an interruption at line {line}, {interruption.where}"
        if interruption.where is None:
            return tried
        tried, line = tried + 1, line + step


def test_after_a_keyboard_interrupt_at_some_line_of_a_step_every_answer_is_right():
    assert check_every_line_of_steps(step=1201) > 2


@pytest.mark.sweep
def test_after_a_keyboard_interrupt_at_many_lines_of_a_step_every_answer_is_right():
    assert check_every_line_of_steps(step=53) > 50


# Several ranks.


@pytest.mark.parametrize(
    ("where", "sharding"), [("on_prefill", DecodeSharding(cp=2)), ("on_logits", DecodeSharding(kvdp=2))]
)
def test_all_ranks_may_leave_at_the_same_point(where, sharding):
    calls = {"on_prefill": 6 // sharding.kvdp, "on_logits": 2 * MOST // sharding.kvdp}[where]

    def rank(comm):
        for at in range(calls):
            generator = make(comm, sharding, callbacks=Callbacks(**{where: raise_at(at, Interrupt("stop"))}))
            with pytest.raises(Interrupt):
                generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=())
            check_next(generator)

    on_virtual_ranks(2, rank)


@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), DecodeSharding(kvdp=2)])
@pytest.mark.parametrize("where", ["on_prefill", "on_logits"])
def test_if_one_rank_leaves_all_raise_comm_error(where, sharding):
    def rank(comm):
        callbacks = {where: raise_at(1, Interrupt("stop"))} if comm.rank == 1 else {}
        generator = make(comm, sharding, callbacks=Callbacks(**callbacks))
        with pytest.raises((Interrupt, CommError)):
            generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=())
        with pytest.raises(CommError):
            generated_rows(generator, NEXT, max_new_tokens=MOST)
        return True

    assert on_virtual_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("both", [False, True])
def test_an_exception_within_a_pass_of_several_ranks_says_what_to_do(both):
    def rank(comm):
        generator = make(comm, DecodeSharding(cp=2))
        error = raise_at(3 if comm.rank else 2, Interrupt("stop"))
        hook = model().embedding.register_forward_hook(lambda *_: raising(error, comm))
        with hook, pytest.raises((Interrupt, CommError)):
            generated_rows(generator, PROMPTS, max_new_tokens=MOST)
        with pytest.raises(CommError, match=r"out of step; start them again|stop"):
            generator.generate(NEXT, max_new_tokens=MOST)
        return True

    def raising(error, comm):
        if (both or comm.rank == 1) and comm._thread == threading.get_ident():
            error()

    assert on_virtual_ranks(2, rank) == [True, True]


@pytest.mark.sweep
@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), DecodeSharding(kvdp=2)])
@pytest.mark.parametrize("both", [False, True])
def test_ranks_interrupted_at_many_lines_work_on_or_are_all_told(both, sharding):
    """Both ranks at the same line or a few lines apart, or one rank alone."""

    def attempt(line):
        def rank(comm):
            generator, where = make(comm, sharding), None
            try:
                if both or comm.rank == 1:
                    where = interrupted_at(line + comm.rank * (line % 7), generator, line % 2 == 0)
                else:
                    generated_rows(generator, PROMPTS, max_new_tokens=3, stop=(), speculative=line % 2 == 0)
                check_next(generator)
            except (CommError, ValueError) as error:  # ValueError: one is interrupted before all have agreed
                return where, type(error).__name__
            return where, "right"

        return on_virtual_ranks(2, rank)

    line, outcomes = 1, Counter()
    while (found := attempt(line)) and any(where is not None for where, _ in found):
        kinds = {kind for _, kind in found}
        assert kinds == {"right"} or "right" not in kinds, (line, found)
        outcomes[" and ".join(sorted(kinds))] += 1
        line += 61
    print(sharding, "both" if both else "one", dict(outcomes))


# Processes.


def left_by_processes(comm, where, alone):
    """What happens to a call that both ranks leave at the same point, or one alone, and to the next one."""
    comm_from(comm, timeout=8)
    leaves = comm.rank == 1 or not alone
    raising = {where: raise_at(1, Interrupt("stop"))} if leaves and where != "closed" else {}
    generator = make(comm, callbacks=Callbacks(**raising))
    outcomes = []
    for prompts in (PROMPTS, NEXT):
        try:
            rows = [[] for _ in prompts]
            for count, token in enumerate(generator.generate(prompts, max_new_tokens=MOST)):
                if leaves and where == "closed" and prompts is PROMPTS and count == 2:
                    raise Interrupt
                rows[token.row].append(token.id)
            outcomes.append(rows)
        except (Interrupt, CommError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.sweep
@pytest.mark.parametrize(("where", "alone"), [("on_prefill", False), ("on_logits", True), ("closed", True)])
def test_processes_work_on_or_are_all_told(where, alone):
    found = run_processes(2, left_by_processes, where, alone)
    if alone:
        assert found == [["CommError", "CommError"], ["Interrupt", "CommError"]]
    else:
        assert found == [["Interrupt", expected_rows(NEXT)]] * 2


# Several calls at a time.


def test_two_calls_run_beside_each_other_and_ranks_that_close_one_alone_are_told():
    def rank(comm):
        generator = make(comm)
        first, second = (generator.generate(prompts, max_new_tokens=MOST) for prompts in (PROMPTS, NEXT))
        begun = [next(first)]
        rows = [[], [], [], []]
        for token in second:
            rows[2 + token.row].append(token.id)
        for token in [*begun, *first]:
            rows[token.row].append(token.id)
        assert rows == expected_rows([*PROMPTS, *NEXT])
        check_next(generator)
        held = generator.generate(PROMPTS, max_new_tokens=MOST)
        next(held)
        if comm.rank == 0:  # one rank still has it
            held.close()
        with pytest.raises((ValueError, CommError)):
            generator.generate(NEXT, max_new_tokens=MOST)
        return True

    assert on_virtual_ranks(2, rank) == [True, True]


def test_a_call_within_a_callback_is_refused():
    def again(*_):
        generator.generate(NEXT)

    generator = make(callbacks=Callbacks(on_prefill=again))
    with pytest.raises(ValueError, match="a callback must not call the Generator that calls it"):
        list(generator.generate(PROMPTS, max_new_tokens=MOST))


def test_an_error_in_a_step_of_another_call_is_raised_by_generate():
    broken = OneLayer()
    generator = Generator(broken, None, cache_tokens=100)
    tokens = generator.generate([PROMPTS[0]], max_new_tokens=MOST, stop=())
    next(tokens)
    with torch.no_grad():
        broken.embedding.weight.fill_(float("nan"))
    assert generator.step() == []
    with pytest.raises(InvalidLogits, match="row 0"):
        next(tokens)


@pytest.mark.parametrize("act", [lambda tokens: tokens.close(), next], ids=["close", "begin"])
def test_an_iterator_that_is_closed_or_begun_within_a_callback(act):
    """As by the garbage collector, which may come at any time: the step that is in progress is not disturbed."""
    others = []

    def on_prefill(*_):
        if others:
            with suppress(ValueError):
                act(others.pop())

    generator = make(callbacks=Callbacks(on_prefill=on_prefill))
    other = generator.generate(PROMPTS[:1], max_new_tokens=MOST)
    if act is not next:
        next(other)
    others.append(other)
    request = generator.submit(PROMPTS[1], max_new_tokens=MOST)
    while not request.finished:
        generator.step()
        check_blocks(generator)
    assert request.ids == uninterrupted(tuple(PROMPTS[1]), MOST)
    assert generator.num_unfinished == 0
    check_next(generator)


def test_ranks_that_begin_iterators_in_another_order_are_told():
    def rank(comm):
        generator = make(comm, DecodeSharding(cp=2))
        calls = [generator.generate([prompt], max_new_tokens=MOST) for prompt in (PROMPTS[0], PROMPTS[0][::-1])]
        with pytest.raises((ValueError, CommError)):
            next(calls[comm.rank])
        return True

    assert on_virtual_ranks(2, rank) == [True, True]


def test_a_rank_that_is_interrupted_tells_the_others_once():
    """In the middle of an exchange it ends the comm; before, it says so where the others agree on the next step."""
    failed, said = [], []
    comm = SimpleNamespace(
        world=2, fail=failed.append, agree=lambda operation, values, error: said.append((operation, error))
    )
    for out_of_step, error in ((True, KeyboardInterrupt("now")), (True, CommError("rank 1 failed"))):
        generator = SimpleNamespace(engine=SimpleNamespace(is_out_of_step=out_of_step), comm=comm)
        Generator._report_interruption(generator, "step", error)
    assert (failed, said) == (["step was interrupted by KeyboardInterrupt: now"], [])
    generator = SimpleNamespace(engine=SimpleNamespace(is_out_of_step=False), comm=comm)
    Generator._report_interruption(generator, "step", ValueError("no"))
    Generator._report_interruption(generator, "step", CommError("rank 1 failed"))
    assert (len(failed), said) == (1, [("step", "ValueError: no")])
