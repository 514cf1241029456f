"""TRL's trainers other than SFTTrainer after `enable()`: what they log over ranks is what they log in one process."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from attnmesh import register_attention
from attnmesh.training import accelerate as integration
from attnmesh.training.accelerate import _check_trainer
from attnmesh.utils.optional import installed
from helpers.memory import peak_bytes
from helpers.training import (
    TRAINERS,
    accelerate_ranks,
    run_ranks,
    shared_result,
    trl_log,
    trl_trainer,
)

needs_trl = pytest.mark.skipif(
    not all(map(installed, ("accelerate", "transformers", "trl", "peft", "datasets"))),
    reason="needs accelerate, transformers, trl, peft and datasets (the extra 'train')",
)
IMPORTS = (*TRAINERS, "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer")

# All prompts and answers have lengths of their own, so that rows are padded, and most lengths are odd.
QUICK = {
    "DPO": ("dpo", {"model": "mistral", "gradient_accumulation_steps": 2}),
    "KTO": ("kto", {"eval_strategy": "no"}),
    "ORPO": ("orpo", {"eval_strategy": "no"}),
    "Reward": ("reward", {"center_rewards_coefficient": 0.1}),
    "GRPO": ("grpo", {"eval_strategy": "no"}),
    "RLOO": ("rloo", {"eval_strategy": "no", "peft": True}),
    "GKD": ("gkd", {"eval_strategy": "no", "lmbda": 0.5}),
}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
SLOW = {
    "DPO with LoRA, whose reference has no adapters": ("dpo", {"peft": True, "gradient_checkpointing": True}),
    "DPO with log-probabilities computed before": ("dpo", {"precompute_ref_log_probs": True}),
    "DPO with weights, two losses and lengths": (
        "dpo",
        {"use_weighting": True, "loss_type": ["sigmoid", "apo_down"], "loss_weights": [1.0, 0.3], "ld_alpha": 0.5},
    ),
    "DPO with FSDP2": ("dpo", FSDP),
    "DPO of experts": ("dpo", {"model": "mixtral", "router_aux_loss_coef": 0.5}),
    "KTO with LoRA": ("kto", {"peft": True}),
    "KTO with log-probabilities computed before": ("kto", {"precompute_ref_log_probs": True}),
    "ORPO of experts": ("orpo", {"model": "mixtral"}),
    "Reward with LoRA": ("reward", {"peft": True}),
    "GRPO with LoRA, and batches that are used twice": (
        "grpo", {"peft": True, "num_iterations": 2, "loss_type": "dapo", "scale_rewards": "batch", "max_steps": 3},
    ),
    "GRPO with evaluation": ("grpo", {"steps_per_generation": 2, "per_device_eval_batch_size": 4}),
    "RLOO with a reference model": ("rloo", {"normalize_advantages": True, "per_device_eval_batch_size": 4}),
    "GKD of answers of the student": ("gkd", {"lmbda": 1.0, "gradient_accumulation_steps": 2}),
    "GKD of answers of the teacher": ("gkd", {"lmbda": 0.0, "seq_kd": True, "beta": 1.0}),
}  # fmt: skip
LEFT_OUT = {"ORPO": ("logits/",)}  # TRL's have those of padding, too


# On every rank.


def in_one_process_and_over_ranks(comm, cases):
    """Each case in one process, which is computed by one of the ranks, and over all of them."""
    one = {
        name: trl_log(1, kind, **changes)
        for i, (name, (kind, changes)) in enumerate(cases.items()) if i % comm.world == comm.rank
    }  # fmt: skip
    dist.barrier()
    integration.enable()
    over_ranks = {name: trl_log(comm.world, kind, **changes) for name, (kind, changes) in cases.items()}
    errors = refused(comm.world) if cases == QUICK else {}
    integration.disable()
    return {"one": one, "over ranks": over_ranks, "errors": errors}


def refused(world):
    """What is refused on every rank."""

    def error_of(kind, **changes):
        try:
            trl_log(world, kind, **changes)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    return {
        "vLLM": error_of("grpo", use_transformers_continuous_batching=True),
        "other options of generation": error_of("rloo", generation_kwargs={"typical_p": 0.5}),
        "FSDP": error_of("grpo", **FSDP),
    }


def data_parallel(comm):
    """Two data-parallel ranks with a batch of 2 each, and one process with a batch of 4."""
    one, how = {}, {"dpo": {"per_device_eval_batch_size": 2}, "grpo": {"eval_strategy": "no"}}
    if comm.rank == 0:
        one["dpo"] = trl_log(1, "dpo", per_device_train_batch_size=4, per_device_eval_batch_size=4)
        one["grpo"] = trl_log(1, "grpo", per_device_train_batch_size=8, data_ranks=2, **how["grpo"])
    dist.barrier()
    integration.enable()
    over_ranks = {
        kind: trl_log(comm.world, kind, cp=2, per_device_train_batch_size=size, **how[kind])
        for kind, size in (("dpo", 2), ("grpo", 4))
    }
    integration.disable()
    return {"one": one, "over ranks": over_ranks, "errors": {}}


def memory(comm, folder):
    """The most memory of a step of DPO with long rows."""
    found = {}
    for world in (1, comm.world):
        if world > 1:
            integration.enable()
        with accelerate_ranks(world):
            sizes = {"hidden_size": 128, "intermediate_size": 1024, "head_dim": 32}
            trainer = trl_trainer(f"{folder}/{world}-{comm.rank}", world, "dpo", sizes=sizes)
            model = trainer.accelerator.prepare(trainer.model)
            ids = torch.randint(3, 64, (2, 801), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": (ids > 9).long()}
            if world == 1:
                register_attention()
                for each in (trainer.model, trainer.ref_model):
                    each.set_attn_implementation("attnmesh")
            model.train()
            found[world] = peak_bytes(lambda model=model, trainer=trainer, batch=batch: (
                trainer.compute_loss(model, batch).backward()
            ))  # fmt: skip
        if world > 1:
            integration.disable()
    return found


# Tests.


def check_logs(results, name):
    """Every rank logs what one process logs.

    Rewards and the KL divergence are differences of log-probabilities of rows, which are about -40: their rounding.
    """
    one = next(result["one"][name] for result in results if name in result["one"])
    assert any(entry.get("grad_norm", 0) > 1e-3 for entry in one)
    left_out = next((keys for prefix, keys in LEFT_OUT.items() if name.startswith(prefix)), ())
    for result in results:
        log = result["over ranks"][name]
        assert [set(entry) for entry in log] == [set(entry) for entry in one]
        for expected, found in zip(one, log, strict=True):
            for key, value in expected.items():
                if not any(part in key for part in left_out):
                    wanted = pytest.approx(value, rel=2e-6, abs=1e-5 if key.endswith("kl") else 2e-6)
                    assert found[key] == wanted, (name, key, one, log)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return shared_result(
        tmp_path_factory, "trl", lambda: run_ranks(2, in_one_process_and_over_ranks, QUICK, imports=IMPORTS)
    )


@needs_trl
@pytest.mark.parametrize("name", QUICK)
def test_logged_values_equal_one_process(quick, name):
    check_logs(quick, name)


@needs_trl
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vLLM", "use_transformers_continuous_batching must not be set .*, where attnmesh generates, got True"),
        ("other options of generation", r"generation_kwargs must not be set .*, got \{'typical_p': 0.5\}"),
        ("FSDP", "fsdp must not be set for GRPOTrainer"),
    ],
)
def test_refused_on_every_rank(quick, name, message):
    for result in quick:
        assert re.search(message, result["errors"][name]), result["errors"][name]


@needs_trl
@pytest.mark.sweep
@pytest.mark.parametrize("name", SLOW)
def test_more_logged_values_equal_one_process(name):
    case = {name: SLOW[name]}
    check_logs(run_ranks(2, in_one_process_and_over_ranks, case, imports=IMPORTS), name)


@needs_trl
@pytest.mark.sweep
def test_data_parallel_and_context_parallel_ranks():
    results = run_ranks(4, data_parallel, imports=IMPORTS)
    for result in results:  # depends on the padding
        for log in (*result["one"].values(), *result["over ranks"].values()):
            log[-1].pop("total_flos")
    for name in ("dpo", "grpo"):
        check_logs(results, name)


@needs_trl
@pytest.mark.sweep
def test_memory_per_rank_falls_with_the_number_of_ranks(tmp_path):
    for found in run_ranks(2, memory, str(tmp_path), imports=IMPORTS):
        assert found[2] < 0.6 * found[1], found


def test_a_model_that_scores_rows_in_another_way_is_no_classifier():
    transformers = pytest.importorskip("transformers")
    from attnmesh.training.trl import _is_classifier

    config = {"vocab_size": 9, "num_labels": 1}
    llama = transformers.LlamaConfig(
        **config, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert _is_classifier(transformers.LlamaForSequenceClassification(llama))
    gpt = transformers.GPT2Config(**config, n_embd=8, n_layer=1, n_head=1)
    assert not _is_classifier(transformers.GPT2ForSequenceClassification(gpt))


def test_kernels_of_liger_are_refused():
    trainer = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})()
    trainer.args = SimpleNamespace(use_liger_kernel=True)
    with pytest.raises(ValueError, match="use_liger_kernel is not supported under context parallelism, got True"):
        _check_trainer(trainer, torch.nn.Linear(1, 1))


def test_ranks_of_one_sequence_count_once():
    from attnmesh.training.trl import DataRanks

    inner = SimpleNamespace(parallelism_config=SimpleNamespace(dp_dim_names=()), num_processes=4, device="cpu")
    data = DataRanks(inner)
    assert (data.num_processes, data.process_index, data.device) == (1, 0, "cpu")
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(data.reduce(x), x)
    assert data.gather_object(["a"]) == ["a"]
    assert data.gather(torch.tensor(3.0)).tolist() == [3.0]
