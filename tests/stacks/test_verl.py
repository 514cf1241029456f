"""verl: a GRPO step with verl's own engine API and losses over gloo ranks, compared with verl's own engine on one rank.

verl's own engine is the reference: on one rank, with padded rows and the eager attention of Transformers.
"""

import doctest
import functools
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import attnmesh
from attnmesh.utils.optional import installed
from helpers.training import run_ranks
from test_examples import run_example

if not installed("verl"):
    pytest.skip("verl is not installed: make test-stacks", allow_module_level=True)

from attnmesh.training import verl

ROWS, VOCABULARY = 4, 40
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip


def windows():
    """Windows of 5, and 6 query heads, which 4 ranks do not divide: verl's Ulysses refuses them."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=3, sliding_window=5))


def sinks():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **SHAPE, num_attention_heads=4, num_key_value_heads=2, sliding_window=4, num_local_experts=2,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def plain():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=3, num_key_value_heads=1))


FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10}


@dataclass(frozen=True)
class Case:
    model: Callable[[], Any]
    sharing: dict[int, int]  # how many ranks share a sequence, by the number of ranks
    engine: dict[str, Any]
    step: dict[str, Any]
    steps: int = 1


CASES = {
    "windows": Case(windows, {1: 1, 2: 2, 4: 4}, {"enable_gradient_checkpointing": True}, FIXED),
    # Two data ranks; parameters are sharded over two ranks each; micro-batches have at most 10 tokens per rank.
    "sinks": Case(sinks, {4: 2}, {"fsdp_size": 2, "entropy_checkpointing": True}, DYNAMIC),
    # Two steps: in the first, the gradient of half of the matrices is 0.
    "lora": Case(plain, {2: 2}, {"lora_rank": 2, "pad_to_length": True, "pad_to_length_bucket": 8}, FIXED, steps=2),
}
REFUSED = {
    "strategy must be 'fsdp2' for attnmesh's engine of verl, got 'fsdp'": {"strategy": "fsdp"},
    "strategy must be 'fsdp2' for attnmesh's engine of verl, got 'fsdp_turbo'": {"strategy": "fsdp_turbo"},
    "use_remove_padding must be True": {"use_remove_padding": False},
    "use_fused_kernels must be False": {"use_fused_kernels": True},
    "use_liger must be False": {"use_liger": True},
    "enable_activation_offload must be False": {"enable_activation_offload": True},
    "ulysses_sequence_parallel_size must divide the 1 ranks": {"ranks": 2},
}


def steps_of_rank(comm, folder):
    """The results of the cases with this number of ranks; of one rank also the references, and what is refused."""
    from helpers import verl_steps

    def last_step(name, case, ranks, **how):
        torch.manual_seed(0)  # of the matrices of LoRA
        engine = verl_steps.new_engine(folder / name, ranks, **case.engine, **how)
        step = case.step | ({"max_token_len_per_gpu": 1000} if how else {})  # the reference is a single rank
        return [verl_steps.grpo_step(engine, verl_steps.batch(ROWS, VOCABULARY), **step) for _ in range(case.steps)][-1]

    found = {
        name: last_step(name, case, case.sharing[comm.world])
        for name, case in CASES.items()
        if comm.world in case.sharing
    }
    if comm.world == 1:
        found["own"] = {name: last_step(name, case, 1, own=True) for name, case in CASES.items()}
        found["refused"] = [refusal(verl_steps, folder / "windows", change) for change in REFUSED.values()]
        found["restarts"] = restarts(verl_steps, folder / "windows")
        found["example"] = failures(verl.enable)
    return found


def refusal(verl_steps, folder, change):
    try:
        verl_steps.new_engine(folder, **{"ranks": 1, **change})
    except ValueError as error:
        return str(error)
    return "served"


def restarts(verl_steps, folder):
    """What the engine raises where positions go on from one sequence to the next, which would see each other."""
    engine, data = verl_steps.new_engine(folder, 1), verl_steps.batch(2, VOCABULARY)
    data["attention_mask"][:] = 1
    data["position_ids"][:] = torch.arange(data["position_ids"].numel()).view(2, -1)
    try:
        verl_steps.grpo_step(engine, data, **FIXED)
    except ValueError as error:
        return str(error)
    return "served"


def failures(name):
    """The number of lines in the example of a docstring that print something else."""
    (found,) = doctest.DocTestFinder(recurse=False).find(name, globs={"am": attnmesh})
    for example in found.examples:
        example.options.clear()  # skipped where verl is not installed
    return doctest.DocTestRunner().run(found).failed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `steps_of_rank` returns on all ranks, by the number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    for name, case in CASES.items():
        torch.manual_seed(0)
        case.model().save_pretrained(folder / name)
    return functools.cache(lambda world: run_ranks(world, steps_of_rank, folder, imports=("helpers.verl_steps",)))


def difference(got, expected):
    assert got.shape == expected.shape
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, case in CASES.items() for world in case.sharing])
def test_a_step_equals_a_step_of_verls_own_engine_on_one_rank(results, name, world):
    expected = results(1)[0]["own"][name]
    found = [each[name] for each in results(world)]
    data_ranks = world // CASES[name].sharing[world]
    assert {each["row"] for each in found} == {i * ROWS // data_ranks for i in range(data_ranks)}
    for each in found:
        for kind, values in each["outputs"].items():
            rows = slice(each["row"], each["row"] + len(values))
            assert difference(values, expected["outputs"][kind][rows]) < 1e-6, kind
        for kind in ("gradients", "parameters"):
            assert each[kind].keys() == expected[kind].keys()
            for part, values in each[kind].items():
                assert np.abs(expected[kind][part]).max() > 0
                assert difference(values, expected[kind][part]) < 1e-5, part
    # verl scales the loss of a data rank so that their mean is the loss of the batch.
    assert np.mean([each["loss"] for each in found]) == pytest.approx(expected["loss"], rel=1e-6)
    norms = [each["grad_norm"] for each in found if each["grad_norm"] is not None]
    assert norms == pytest.approx([expected["grad_norm"]] * data_ranks, rel=1e-6)  # one of the ranks that share


def test_what_is_not_served_is_refused(results):
    for message, found in zip(REFUSED, results(1)[0]["refused"], strict=True):
        assert message in found
    assert "position_ids must restart where a sequence of the micro-batch begins" in results(1)[0]["restarts"]


def test_the_example_of_enable_runs(results):
    assert results(1)[0]["example"] == 0


def test_the_example_learns_over_two_ranks():
    shown = run_example("train_grpo_verl", torchrun=2)  # it asserts that the reward doubles
    assert re.findall(r"^step (\d+): mean reward 0\.", shown, flags=re.MULTILINE) == [str(i) for i in range(12)]


def test_another_version_another_vendor_and_another_device_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="device must be"):
        verl.enable(device="npu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    with pytest.raises(ValueError, match="VERL_ENGINE_VENDOR must be unset or 'attnmesh'"):
        verl.enable()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(ValueError, match=r"version of verl must be 0\.9\.1, got 0\.8\.0"):
        verl.enable()
