"""Bad arguments: every public callable accepts a value or raises ValueError with the argument and the value."""

import inspect
import random
import traceback

import pytest
import torch

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.generation.requests import SubmitOptions
from attnmesh.ops.decode.api import DecodeOptions, PagedDecodeOptions
from attnmesh.ops.dense.call import ScoreOptions
from attnmesh.parallel.query_distributed import RingOptions
from attnmesh.training import accelerate, batch, data_parallel
from attnmesh.utils import validation
from helpers import arguments
from helpers.argument_calls import CALLS, COLLECTIVE, NOT_FUZZED, RECEIVERS, SKIPPED, WORLD
from helpers.arguments import Case, Fuzzer, Outcome, calls_of, finish, judge, limits, names, targets

FUZZER = Fuzzer(CALLS, RECEIVERS, NOT_FUZZED, SKIPPED)
SAMPLED_CALLABLES, SAMPLED_CASES = 60, 16  # cases of each callable
SEED = 17
# These import Transformers.
SLOW = {
    "load_model", "generate", "Generator", "Generator.generate", "Generator.submit", "Generator.stream",
    "Generator.cancel", "attention_from_transformers", "shard_inputs",
}  # fmt: skip
SLOW_TEST = pytest.mark.sweep
GUILTY = 1  # the rank that gets a bad value


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a string is a valid path, and a report is written to it


def findings(cases: list[Case]) -> list[str]:
    """Run bad calls; returns what is wrong with their answers."""
    outcomes = [(case, FUZZER.run(case)) for case in cases]
    return [f"{case}: {outcome.kind}: {outcome.text}" for case, outcome in outcomes if outcome.is_finding]


def many(cases: list, most: int = 300) -> list:
    """So many of the cases, the same ones each time: every parameter has dozens of bad values of the same kinds."""
    return random.Random(0).sample(cases, min(len(cases), most))


def run_valid_calls(name: str) -> None:
    """Run the valid calls of a callable, each of which must succeed."""
    for variant in range(len(calls_of(FUZZER.targets[name], CALLS))):
        receiver, arguments = FUZZER.make(name, variant)
        finish(FUZZER.call(name, receiver, arguments))


def test_every_public_callable_has_a_valid_call():
    """A new public name is fuzzed as soon as it has a valid call in helpers/argument_calls.py, and fails here until."""
    for target in FUZZER.targets.values():
        assert calls_of(target, CALLS)


def test_the_tables_name_public_callables_only():
    """A renamed or removed callable leaves nothing behind."""
    known = {name for target in targets(RECEIVERS).values() for name in names_of(target)}
    assert CALLS.keys() | COLLECTIVE.keys() | NOT_FUZZED.keys() <= known


def names_of(target) -> list[str]:
    """The name of a callable, and those of the methods it may be inherited from."""
    method = target.name.partition(".")[2]
    return [target.name, *(f"{base.__name__}.{method}" for base in getattr(target.owner, "__mro__", ()))]


# How many.

MOST_ARGUMENTS = 12
RECORDS = {"GenerationStats": "a result", "Request": "made by a Generator: `submit` takes its arguments"}
CONTRACT = {"attention": 13, "Generator": 13, "generate": 13}  # with `reproducible`, which the contract names
# `**options: Unpack[...]` is one argument: a TypedDict of what few calls need, whose names are known.
WITH_OPTIONS = {
    "decode_attention": DecodeOptions, "paged_decode_attention": PagedDecodeOptions,
    "paged_prefill_attention": ScoreOptions, "ring_distributed_attention": RingOptions,
    "Generator.submit": SubmitOptions,
}  # fmt: skip


def all_parameters() -> dict[str, dict[str, inspect.Parameter]]:
    """The parameters of every public function, constructor and method, and of those of `attnmesh.training`."""
    found = {name: target.parameters for name, target in targets(RECEIVERS).items()}
    for module in (accelerate, batch, data_parallel):
        for name, value in vars(module).items():
            if inspect.isroutine(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = dict(inspect.signature(value).parameters)
    return found


def test_public_callables_take_at_most_twelve_arguments():
    """More are fields of a value, such as a `CacheSpec` or a `SparseMask`."""
    counts = {name: len(parameters) for name, parameters in all_parameters().items() if name not in RECORDS}
    assert {name: n for name, n in counts.items() if n > MOST_ARGUMENTS} == CONTRACT
    assert "attnmesh.training.accelerate.enable" in counts


def test_options_are_typed_and_few_functions_have_them():
    options = {
        name: each.annotation
        for name, parameters in all_parameters().items()
        for each in parameters.values()
        if each.kind is inspect.Parameter.VAR_KEYWORD and str(each.annotation).startswith("Unpack")
    }
    assert options == {name: f"Unpack[{kind.__name__}]" for name, kind in WITH_OPTIONS.items()}


def test_some_bad_arguments_are_refused_by_name_and_value():
    print("seed", SEED)
    chosen = random.Random(SEED)
    cases = []
    for name in chosen.sample(sorted(FUZZER.targets.keys() - SLOW), SAMPLED_CALLABLES):
        run_valid_calls(name)
        every = list(FUZZER.cases(name))
        cases += chosen.sample(every, min(SAMPLED_CASES, len(every)))
    assert findings(cases) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUZZER.targets)
def test_many_bad_arguments_are_refused_by_name_and_value(name):
    run_valid_calls(name)
    cases = many(list(FUZZER.cases(name)))
    print(f"{len(cases)} bad calls of {name}")
    assert findings(cases) == []


# Valid calls build no words of an error: a tensor would have to be read for them, which waits for a GPU.


@pytest.fixture
def formatted(monkeypatch):
    """Where tensors were formatted, and values as errors show them."""
    found = []

    def noted(function):
        def inner(*args, **kwargs):
            found.append("".join(traceback.format_stack(limit=6)))
            return function(*args, **kwargs)

        return inner

    monkeypatch.setattr(torch.Tensor, "__repr__", noted(torch.Tensor.__repr__))
    monkeypatch.setattr(validation._shortened, "repr", noted(validation._shortened.repr))
    return found


def test_the_counter_sees_what_is_formatted(formatted):
    assert validation.shown(torch.zeros(2)) == "float32 tensor [2] on cpu"
    assert f"{torch.zeros(2)}" == "tensor([0., 0.])"
    assert len(formatted) == 2


def test_an_error_shows_tensors_in_records_without_reading_them(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__repr__", None)
    state = State(torch.zeros(2, 3), torch.zeros(2))
    assert validation.shown([state]) == "[State(out=float32 tensor [2, 3] on cpu, lse=float32 tensor [2] on cpu)]"
    stored = am.Quantized(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2))
    assert validation.shown(stored).startswith("Quantized(values=int8 tensor [2, 3] on cpu, scales=float32")


@pytest.mark.parametrize("names", [sorted(FUZZER.targets.keys() - SLOW), pytest.param(sorted(SLOW), marks=SLOW_TEST)])
def test_valid_calls_format_nothing(names, formatted):
    for name in names:
        run_valid_calls(name)
        assert formatted == [], name


@pytest.mark.parametrize(
    "names", [sorted(COLLECTIVE.keys() - SLOW), pytest.param(sorted(COLLECTIVE.keys() & SLOW), marks=SLOW_TEST)]
)
def test_valid_calls_on_ranks_format_nothing(names, formatted):
    for name in names:
        am.run_virtual(WORLD, lambda comm, name=name: finish(FUZZER.call(name, *COLLECTIVE[name](comm))), timeout=60)
        assert formatted == [], name


# On one of several ranks.


def on_ranks(name: str, parameter: str, label: str) -> str | None:
    """Give one rank a bad value; returns what is wrong: a rank that goes on, waits, or is not told the argument."""

    def program(comm: am.comm.Comm) -> Exception | None:
        receiver, arguments = COLLECTIVE[name](comm)
        if comm.rank == GUILTY:
            arguments[parameter] = FUZZER.replacement(name, arguments, parameter, label)
        try:
            finish(FUZZER.call(name, receiver, arguments))
        except Exception as error:
            return error
        return None

    try:
        with limits():
            errors = am.run_virtual(WORLD, program, timeout=60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not any(errors):
        return None
    innocent = errors[1 - GUILTY]
    if not all(isinstance(error, ValueError) for error in errors):
        return f"not a ValueError on every rank: {errors}"
    told = any(names(str(innocent), each) for each in (parameter, *FUZZER.targets[name].parameters))
    return None if told or "ranks disagree" in str(innocent) else f"not told why: {innocent}"


def cases_on_ranks(name: str) -> list[tuple[str, str]]:
    """Every parameter of a collective call except the comm, and every bad value."""
    _, arguments = am.run_virtual(WORLD, COLLECTIVE[name])[0]
    known = [each for each in FUZZER.parameters(name, arguments) if each not in ("comm", "group")]
    return [(parameter, label) for parameter in known for label in FUZZER.labels(name, arguments, parameter)]


def test_some_bad_arguments_on_one_rank_are_refused_on_all():
    print("seed", SEED)
    chosen = random.Random(SEED)
    for name in sorted(COLLECTIVE.keys() - SLOW):
        for parameter, label in chosen.sample(cases_on_ranks(name), 6):
            assert on_ranks(name, parameter, label) is None, (name, parameter, label)


@pytest.mark.sweep
@pytest.mark.parametrize("name", COLLECTIVE)
def test_many_bad_arguments_on_one_rank_are_refused_on_all(name):
    cases = many(cases_on_ranks(name))
    print(f"{len(cases)} bad calls of {name} on one of {WORLD} ranks")
    wrong = {f"{parameter}={label}": on_ranks(name, parameter, label) for parameter, label in cases}
    assert {case: said for case, said in wrong.items() if said is not None} == {}


# The judge itself.


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lambda n: n + 1, "TypeError"),
        (lambda n: {}[n], "KeyError"),
        (lambda n: None, "accepted a value of the wrong type"),
        (lambda n: _raise(ValueError("must be positive, got 'many'")), "argument not named"),
        (lambda n: _raise(ValueError("n must be positive")), "value not named"),
        (lambda n: _raise(ValueError("n must be an integer, got 'many'")), "refused"),
        (lambda n: [0] * (1 << 40), "MemoryError"),
    ],
)
def test_the_judge(body, kind):
    assert judge(lambda: body("many"), "n", "many", int).kind == kind


def _raise(error: Exception) -> None:
    raise error


def test_the_judge_ends_a_call_that_does_not_end(monkeypatch):
    def endless() -> None:
        while True:
            pass

    monkeypatch.setattr(arguments, "TIME_LIMIT", 0.2)
    assert judge(endless, "n", 1, int) == Outcome("stuck", "ran for 0.2 s")
