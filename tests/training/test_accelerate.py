"""accelerate, Trainer and TRL after `enable()`: what they log over ranks is what they log in one process."""

import importlib
import importlib.metadata
import re
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from attnmesh.integrations.transformers_attention import Patches
from attnmesh.training import accelerate as integration
from attnmesh.training.accelerate import _check_trainer, _digest
from attnmesh.utils.optional import installed
from helpers.training import (
    accelerate_ranks,
    files_of_a_training_step,
    image_log,
    image_loop_log,
    loop_log,
    packed_logits,
    padded_batch,
    random_rows,
    run_ranks,
    sft_log,
    shared_result,
    trainer_log,
    training_model,
)

trainer_module = sys.modules[_check_trainer.__module__]
needs_trl = pytest.mark.skipif(
    not all(map(installed, ("accelerate", "transformers", "trl", "peft", "datasets"))),
    reason="needs accelerate, transformers, trl, peft and datasets (the extra 'train')",
)


def metrics_of_real_tokens(prediction):
    """Of the logits of all tokens that are not padding."""
    real = prediction.label_ids != -100
    logits = prediction.predictions[:, : real.shape[1]]
    likeliest = logits.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {
        "accuracy": float(likeliest[real[:, 1:]].mean()),
        "size": float(abs(logits[real]).mean()),
        "rows": len(real),
    }


def shifting_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """As most examples have it: right in one process, and of other labels over ranks."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def scaled_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The loss of Trainer, times 2."""
    found = type(self).__mro__[1].compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    return (2 * found[0], found[1]) if return_outputs else 2 * found


FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GptOssDecoderLayer"]}}
QUICK = {
    "padded batches": (
        trainer_log, "llama", {"gradient_accumulation_steps": 2, "evaluate_first": True, "own_loss": scaled_loss},
    ),
    "sinks, checkpointing and FSDP2": (trainer_log, "gpt_oss", {"gradient_checkpointing": True, **FSDP}),
    "packing, windows and LoRA": (sft_log, "mistral", {"peft": "lora"}),
    "own loop": (loop_log, "mistral", {}),
    "images": (image_log, "gemma3", {"gradient_accumulation_steps": 2}),
    "leakage": (packed_logits, "mistral", {}),
}  # fmt: skip
SLOW = {
    "images in an own loop": (image_loop_log, "qwen2_5_vl", {}),
    "images and FSDP2": (image_log, "qwen3_vl", {"fsdp": True, "fsdp_config": {"version": 2}}),
    "images and checkpointing": (image_log, "qwen2_5_vl", {"gradient_checkpointing": True}),
    "bf16": (trainer_log, "llama", {"bf16": True}),
    "chunked layers": (trainer_log, "llama4_text", {}),
    "label smoothing": (trainer_log, "llama", {"label_smoothing_factor": 0.1}),
    "tokens averaged on each device": (
        trainer_log, "mistral", {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    ),
    "reentrant checkpointing": (
        trainer_log, "mistral",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_steps": 6},
    ),
    "no clipping, odd batches": (trainer_log, "llama", {"max_grad_norm": 0.0, "per_device_train_batch_size": 3}),
    "padding-free": (sft_log, "mistral", {"packing": False, "padding_free": True, "max_length": None}),
    "packing of whole rows": (sft_log, "llama", {"packing_strategy": "wrapped"}),
    "padded SFT": (sft_log, "llama", {"packing": False}),
    "dynamic fine-tuning": (sft_log, "llama", {"loss_type": "dft", "gradient_accumulation_steps": 2}),
    "smoothed SFT": (sft_log, "llama", {"label_smoothing_factor": 0.1}),
    "own loop with FSDP2": (loop_log, "llama", {"fsdp": True}),
    "chunked own loop": (loop_log, "llama4_text", {}),
    "experts": (trainer_log, "mixtral", {"gradient_accumulation_steps": 2}),
    "experts, tokens averaged on each device": (trainer_log, "mixtral", {"average_tokens_across_devices": False}),
    "experts in SFT": (sft_log, "mixtral", {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2}),
    "experts of GPT-OSS in SFT": (sft_log, "gpt_oss", {"router_aux_loss_coef": 0.5, "packing": False}),
    "experts of Qwen3-MoE in SFT": (sft_log, "qwen3_moe", {"router_aux_loss_coef": 0.5}),
    "experts in an own loop": (loop_log, "mixtral", {}),
    "streamed batches": (trainer_log, "mistral", {"streamed": True, "gradient_accumulation_steps": 2}),
    "recurrent layers": (trainer_log, "bamba", {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
    "delta rules in SFT": (sft_log, "qwen3_5_text", {"packing": False}),
    "short convolutions": (trainer_log, "lfm2", {"label_smoothing_factor": 0.1}),
    "compiled": (trainer_log, "llama", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "leakage with sinks": (packed_logits, "gpt_oss", {}),
    "leakage with recurrent layers": (packed_logits, "qwen3_5_text", {}),
    "logits for metrics": (
        trainer_log, "mistral", {"prediction_loss_only": False, "more": {"compute_metrics": metrics_of_real_tokens}},
    ),
}  # fmt: skip
CLASSES = {
    "accelerate": {
        "Accelerator": ("_prepare_cp", "prepare_data_loader", "gather_for_metrics"),
        "ParallelismConfig": ("_validate_accelerator",),
    },
    "accelerate.state": {"AcceleratorState": ("__init__",)},
    "transformers.trainer": {
        "Trainer": (
            "__init__", "_prepare_context_parallel_inputs", "_get_num_items_in_batch", "prediction_step",
            "evaluation_loop", "compute_loss",
        ),
    },
    "trl.trainer.sft_trainer": {"SFTTrainer": ("__init__", "prediction_step", "compute_loss")},
}  # fmt: skip


# On every rank.


def in_one_process_and_over_ranks(comm, cases):
    """Each case in one process, which is computed by one of the ranks, and over all of them."""
    one = {
        name: run(1, kind, **changes)
        for i, (name, (run, kind, changes)) in enumerate(cases.items()) if i % comm.world == comm.rank
    }  # fmt: skip
    integration.enable()
    with files_of_a_training_step(3) as files:  # two are one step of the optimizer
        over_ranks = {name: run(comm.world, kind, **how) for name, (run, kind, how) in cases.items()}
    return {"one": one, "over ranks": over_ranks, "files": files}


def patched():
    return [
        vars(getattr(sys.modules[module], owner)).get(name)
        for module, owners in CLASSES.items() for owner, names in owners.items() for name in names
    ]  # fmt: skip


def error_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def refused_alone(world):
    """What accelerate refuses without attnmesh, and what it does with padding."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.big_modeling import _attach_context_parallel_hooks

    with accelerate_ranks(world):
        refused = {"CPU": error_of(lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=world)))}
    for kind in ("mistral", "gpt_oss", "llama4_text"):
        refused[kind] = error_of(lambda kind=kind: _attach_context_parallel_hooks(training_model(kind)))
    model, batch = training_model().eval(), padded_batch(random_rows(2))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        unmasked = model(input_ids=batch["input_ids"]).logits
        _attach_context_parallel_hooks(model)
        refused["padding is ignored"] = str(bool((model(**batch).logits == unmasked).all()))
    return refused


def packing_refused_by_trl(world, init):
    """With the __init__ of SFTTrainer as TRL has it."""
    from trl import SFTTrainer

    with patch.object(SFTTrainer, "__init__", init):
        return error_of(lambda: sft_log(world))


def refused_over_ranks(comm):
    """What is refused on every rank with attnmesh."""
    from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForSequenceClassification

    from attnmesh.training.accelerate import AcceleratorRanks

    world = comm.world
    errors = {}
    with accelerate_ranks(world):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=world))
        ids = torch.arange(8, 22)[None]

        def call(model, batch, *, buffers):
            with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                model(**batch)

        def prepared(*args, **kwargs):
            return accelerator.prepare(training_model(*args, **kwargs)).train()

        model = prepared()
        labels, mine = ids.clone(), ids + comm.rank
        alone = SimpleNamespace(
            torch_device_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), unwrap_model=None
        )
        errors["outside of the context"] = error_of(lambda: model(input_ids=ids))
        errors["labels that are not sharded"] = error_of(
            lambda: call(model, {"input_ids": ids, "labels": labels}, buffers=[ids])
        )
        errors["ranks with different batches"] = error_of(lambda: call(model, {"input_ids": mine}, buffers=[mine]))
        errors["buffers of different lengths"] = error_of(lambda: call(model, {}, buffers=[ids, ids[:, 1:].clone()]))
        errors["recurrent model"] = error_of(lambda: prepared("rwkv"))
        errors["attention dropout"] = error_of(
            lambda: call(prepared(attention_dropout=0.1), {"input_ids": ids}, buffers=[ids])
        )
        errors["classifier"] = error_of(
            lambda: accelerator.prepare(LlamaForSequenceClassification(model.module.config))
        )
        with accelerator.maybe_context_parallel(buffers=[labels], buffer_seq_dims=[1], no_restore_buffers={labels}):
            errors["nested contexts"] = error_of(lambda: call(model, {}, buffers=[ids]))
        errors["buffer that stays sharded"] = str(len(labels[0]))
        streamed = DataLoaderConfiguration(dispatch_batches=True)
        with patch.object(accelerator, "dataloader_config", streamed):
            errors["dispatched batches"] = error_of(lambda: accelerator.prepare(torch.utils.data.DataLoader([1, 2])))
        teacher = training_model().eval()
        errors["teacher that was not prepared"] = error_of(lambda: call(teacher, {"input_ids": ids}, buffers=[ids]))
        errors["prepared teacher"] = str(teacher_logits_are_equal(accelerator, teacher, ids))
        errors["no cp dimension"] = error_of(lambda: AcceleratorRanks(alone, {}))
        with torch.no_grad():  # outside of the context, a model is computed whole on every rank
            whole = model(input_ids=ids).logits
        errors["evaluation outside of the context"] = str(
            (whole - training_model()(input_ids=ids).logits).abs().max() < 1e-5
        )
    errors |= refused_by_trainers(world)
    return errors


@torch.no_grad()
def teacher_logits_are_equal(accelerator, teacher, ids):
    """Of a model that is called in the context beside the one that is trained, and in one process."""
    wanted = teacher(input_ids=ids).logits
    prepared = accelerator.prepare(teacher)
    with accelerator.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1]):
        found = prepared(input_ids=ids).logits
    return torch.allclose(found, teacher._attnmesh_ranks.cp.shard(wanted, 1), rtol=1e-4, atol=1e-5)


def refused_by_trainers(world):
    return {
        "compute_loss that shifts": error_of(lambda: trainer_log(world, own_loss=shifting_loss)),
        "compute_loss_func": error_of(lambda: trainer_log(world, more={"compute_loss_func": lambda *_, **__: None})),
        "NEFTune": error_of(lambda: trainer_log(world, neftune_noise_alpha=5.0)),
        "prompt tuning": error_of(lambda: sft_log(world, peft="prompt")),
    }


def quick_checks(comm):
    before = patched()
    from trl import SFTTrainer

    sft_init, alone = SFTTrainer.__init__, refused_alone(comm.world)
    results = in_one_process_and_over_ranks(comm, QUICK)
    results |= {
        "alone": alone | {"packing": packing_refused_by_trl(comm.world, sft_init)},
        "errors": refused_over_ranks(comm),
        "enabled": [a is not b for a, b in zip(before, patched(), strict=True)],
    }
    integration.disable()
    restored = [a is b for a, b in zip(before, patched(), strict=True)]
    return results | {"restored": restored, "alone again": refused_alone(comm.world)}


def resumed(comm, folder):
    """Four steps without a break, and two more after two with another number of ranks."""
    how = {
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "no",
    }
    logs = {}
    if comm.rank == 0:
        logs["one process"] = trainer_log(1, output_dir=f"{folder}/one", **how)
    dist.barrier()
    integration.enable()
    trainer_log(comm.world, output_dir=f"{folder}/ranks", **how | {"max_steps": 2})
    if comm.rank == 0:
        checkpoint = f"{folder}/ranks/checkpoint-2"
        logs["resumed in one process"] = trainer_log(1, output_dir=f"{folder}/3", resume=checkpoint, **how)
    dist.barrier()
    checkpoint = f"{folder}/one/checkpoint-2"
    logs["resumed over ranks"] = trainer_log(comm.world, output_dir=f"{folder}/4", resume=checkpoint, **how)
    return logs


def data_parallel(comm, cases):
    """Two data-parallel ranks with a batch of 2 each, and one process with a batch of 4."""
    how = {"eval_rows": 8, "gradient_accumulation_steps": 2}
    one = {}
    if comm.rank == 0:
        one = {
            name: trainer_log(1, per_device_train_batch_size=4, per_device_eval_batch_size=4, **how, **case)
            for name, case in cases.items()
        }  # fmt: skip
    dist.barrier()
    integration.enable()
    return {
        "one": one,
        "over ranks": {name: trainer_log(comm.world, cp=2, **how, **case) for name, case in cases.items()},
    }


DATA_PARALLEL = {"DDP": {"kind": "mistral"}, "FSDP2": {"kind": "gpt_oss", **FSDP}}


# Tests.


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return shared_result(tmp_path_factory, "quick", lambda: run_ranks(2, quick_checks))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return shared_result(tmp_path_factory, "slow", lambda: run_ranks(2, in_one_process_and_over_ranks, SLOW))


def check_logs(results, name, tolerance=2e-5):
    """Every rank logs what one process logs: losses, gradient norms, evaluation losses, accuracies and counts."""
    one = next(result["one"][name] for result in results if name in result["one"])
    assert any("loss" in entry for entry in one)
    for result in results:
        log = result["over ranks"][name]
        assert [set(entry) for entry in log] == [set(entry) for entry in one]
        for expected, found in zip(one, log, strict=True):
            for key, value in expected.items():
                assert found[key] == pytest.approx(value, rel=tolerance, abs=1e-12), (name, key, one, log)


@needs_trl
@pytest.mark.parametrize("name", [name for name in QUICK if "leakage" not in name])
def test_logged_values_equal_one_process(quick, name):
    check_logs(quick, name)


@needs_trl
def test_a_training_step_enters_few_files(quick):
    """So that it can be read in a debugger. It is the second step of the optimizer, with a batch that is new."""
    for result in quick:
        ours = {name for name in result["files"] if name.startswith(("integrations", "training"))}
        assert ours == {
            "integrations/sharded_pass.py", "integrations/transformers_attention.py",
            "integrations/transformers_models.py", "training/accelerate.py", "training/batch.py",
        }  # fmt: skip
        assert len(result["files"]) <= 50, sorted(result["files"])


@needs_trl
@pytest.mark.sweep
def test_more_logged_values_equal_one_process(slow):
    """And documents of packed rows do not see the others. One test: a part of the sweeps starts the ranks once."""
    for name in SLOW:
        if "leakage" in name:
            check_documents(slow, name)
        else:
            check_logs(slow, name, tolerance=5e-3 if name == "bf16" else 2e-5)


@needs_trl
@pytest.mark.sweep
def test_a_checkpoint_resumes_with_another_cp_size(tmp_path):
    logs, _ = run_ranks(2, resumed, str(tmp_path))
    expected = [entry for entry in logs["one process"] if "loss" in entry]
    assert len(expected) == 4
    for name in ("resumed in one process", "resumed over ranks"):
        found = [entry for entry in logs[name] if "loss" in entry]
        assert [entry["loss"] for entry in found] == pytest.approx([entry["loss"] for entry in expected], rel=2e-5), (
            name
        )


@needs_trl
@pytest.mark.sweep
def test_data_parallel_and_context_parallel_ranks():
    results = run_ranks(4, data_parallel, DATA_PARALLEL)
    for result in results:  # depends on the padding
        for log in (*result["one"].values(), *result["over ranks"].values()):
            log[-1].pop("total_flos")
    for name in DATA_PARALLEL:
        check_logs(results, name)


def check_documents(results, name):
    """Perturb one document of a packed row (the probe of trl #6843): only its own positions may change."""
    starts, *expected = next(result["one"][name] for result in results if name in result["one"])
    for result in results:
        _, *logits = result["over ranks"][name]
        for found, alone in zip(logits, expected, strict=True):  # every document as if it were alone
            assert abs(found - alone).max() < 1e-4
        difference = abs(logits[1] - logits[0]).max(-1)[0]
        assert (difference[starts[1] : starts[2]] > 1e-3).all()
        assert max(difference[: starts[1]].max(), difference[starts[2] :].max()) < 1e-6


@needs_trl
def test_a_packed_document_does_not_see_the_others(quick):
    check_documents(quick, "leakage")


@needs_trl
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("outside of the context", "the model must be called inside `with accelerator.maybe_context_parallel"),
        ("labels that are not sharded", "labels must be one of the buffers of maybe_context_parallel, got another"),
        ("ranks with different batches", r"maybe_context_parallel: ranks disagree: checksum of buffers\[0\]"),
        ("buffers of different lengths", "the buffers along buffer_seq_dims must be one length"),
        ("recurrent model", "RwkvForCausalLM: layers with a recurrent state are not served"),
        ("attention dropout", "attention dropout must be 0, got 0.1"),
        (
            "classifier",
            "must be a causal language model, or a model without a head, got LlamaForSequenceClassification",
        ),
        ("nested contexts", "maybe_context_parallel must not be entered inside itself"),
        ("buffer that stays sharded", "^7$"),
        ("dispatched batches", "dispatch_batches must be False or None under context parallelism, got True"),
        ("no cp dimension", r"must have a dimension 'cp', got dimensions \('dp',\)"),
        ("compute_loss_func", "compute_loss_func must be None under context parallelism"),
        ("compute_loss that shifts", r"must read inputs\['shift_labels'\].*, got one that reads inputs\['labels'\]"),
        ("teacher that was not prepared", r"must be prepared \(accelerator.prepare\), got LlamaForCausalLM"),
        ("prepared teacher", "True"),
        ("NEFTune", "neftune_noise_alpha is not supported under context parallelism, got 5.0"),
        ("prompt tuning", "the PEFT method must not add tokens to the sequence .*, got PromptTuningConfig"),
        ("evaluation outside of the context", "True"),
    ],
)
def test_refused_on_every_rank(quick, name, message):
    for result in quick:
        assert re.search(message, result["errors"][name]), result["errors"][name]


@needs_trl
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CPU", "ParallelismConfig is only compatible .* got DistributedType.MULTI_CPU"),
        ("mistral", r"does not support attention layers of type \['sliding_attention'\]"),
        ("gpt_oss", r"does not support attention layers of type \['sliding_attention'\]"),
        ("llama4_text", r"does not support attention layers of type \['chunked_attention'\]"),
        ("packing", "Packing is not compatible with context parallelism"),
        ("padding is ignored", "True"),
    ],
)
def test_refused_without_attnmesh(quick, name, message):
    for result in quick:
        assert re.search(message, result["alone"][name]), result["alone"][name]


@needs_trl
def test_disable_restores_everything(quick):
    for result in quick:
        assert all(result["enabled"])
        assert all(result["restored"])
        assert result["alone again"] == {name: result["alone"][name] for name in result["alone again"]}


@pytest.mark.parametrize(("package", "version"), [("accelerate", "1.16.0"), ("transformers", "6.0.1"), ("trl", "1.9")])
def test_an_unknown_version_is_refused(monkeypatch, package, version):
    tested = {"accelerate": "1.15.3", "transformers": "5.22.2", "trl": "1.16.0"} | {package: version}
    monkeypatch.setattr(importlib.metadata, "version", tested.__getitem__)
    with pytest.raises(
        ValueError,
        match=rf"version of {package} must be .*, got {version}: .* accelerate 1.15, transformers 5.22, trl 1.16",
    ):
        integration.enable()


def test_deepspeed_with_context_parallelism_is_refused():
    accelerator = SimpleNamespace(distributed_type=pytest.importorskip("accelerate").DistributedType.DEEPSPEED)
    seen = []
    integration._validate_accelerator(
        lambda *given: seen.append(given), SimpleNamespace(cp_enabled=False, cp_size=1), accelerator
    )
    assert len(seen) == 1  # without context parallelism it is accelerate's decision
    with pytest.raises(ValueError, match=r"deepspeed_plugin must be None with cp_size > 1, got cp_size 2.*FSDP2"):
        integration._validate_accelerator(seen.append, SimpleNamespace(cp_enabled=True, cp_size=2), accelerator)
    assert len(seen) == 1


def test_options_are_checked_before_anything_is_replaced():
    with pytest.raises(ValueError, match=r"schedule must be one of .*, got 'star'"):
        integration.enable(schedule="star")
    with pytest.raises(ValueError, match="layout"):
        integration.enable(layout="zigzag")


def test_patches_reach_modules_that_are_imported_later(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("class Base:\n    def f(self): return 1\nclass A(Base): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    patches = Patches()
    patches.when_imported("imported_later", lambda module: patches.replace(module.A, "f", lambda f, self: f(self) + 1))
    import imported_later

    assert imported_later.A().f() == 2
    assert imported_later.Base().f() == 1
    patches.undo()
    assert imported_later.A().f() == 1
    assert "f" not in vars(imported_later.A)
    assert patches._finder not in sys.meta_path


def test_tokens_on_an_accelerator_are_compared_by_a_digest():
    ids = torch.randint(0, 100_000, (2, 500), generator=torch.Generator().manual_seed(0))
    other, swapped = ids.clone(), ids.clone()
    other[1, 7] += 1
    swapped[0, [3, 4]] = ids[0, [4, 3]]
    assert _digest(ids) == _digest(ids.int())
    assert len({int(_digest(x)) for x in (ids, other, swapped)}) == 3


def test_the_loss_of_experts_is_whole_where_its_module_is_imported_later(monkeypatch):
    """TRL imports it in the first step, for any model with experts."""
    monkeypatch.delitem(sys.modules, integration._MIXTRAL, raising=False)
    with integration.whole_balance([training_model("gpt_oss")], lambda: None, 1.0):
        found = importlib.import_module(integration._MIXTRAL).load_balancing_loss_func
        assert found.__module__ == integration.__name__
    assert sys.modules[integration._MIXTRAL].load_balancing_loss_func is not found


@pytest.mark.parametrize("name", ["OnlineDPOTrainer", "CPOTrainer", "DistillationTrainer"])
def test_other_trainers_of_trl_are_refused(name):
    """Also one that is derived from a trainer that is served."""
    served = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})
    trainer = type(name, (served,), {"__module__": "trl.some.module"})()
    with pytest.raises(ValueError, match=f"must be Transformers' Trainer or TRL's SFTTrainer, .*, got {name}"):
        _check_trainer(trainer, torch.nn.Linear(1, 1))


def test_training_without_reduced_gradients_is_refused_and_a_loss_of_one_s_own_is_told_what_it_gets():
    class Own:
        args, compute_loss_func = SimpleNamespace(), None

        def compute_loss(self):
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"must be wrapped by DDP or FSDP2 in training.*got Linear"):
        _check_trainer(Own(), torch.nn.Linear(1, 1))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"compute_loss of Own is given .*'shift_labels'. are its la"):
        _check_trainer(Own(), torch.nn.Linear(1, 1))


def test_a_smoothed_loss_is_divided_by_the_items_of_the_batch_or_else_by_the_share():
    def smoother(outputs, labels, shift_labels, num_items_in_batch):
        return outputs, labels, shift_labels, num_items_in_batch

    assert trainer_module._smoothed_loss(smoother, 3, "out", "labels", True) == ("out", "labels", False, 3)
    assert trainer_module._smoothed_loss(smoother, 3, "out", "labels", True, 7) == ("out", "labels", False, 7)


@pytest.mark.parametrize(
    ("models", "wrapped", "fsdp", "forgotten"),
    [
        ([], False, False, True),
        (["trained before"], False, False, False),
        ([], True, False, False),
        ([], False, True, False),
    ],
)
def test_what_is_prepared_for_an_evaluation_before_training_is_wrapped_later(
    monkeypatch, models, wrapped, fsdp, forgotten
):
    """Accelerate remembers a model that it prepared; `train` would take it for one that DDP wraps."""
    monkeypatch.setattr(trainer_module, "shards", lambda trainer: True)
    monkeypatch.setattr(trainer_module, "ranks_of", lambda accelerator: None)
    model = SimpleNamespace(_is_accelerate_prepared=True)
    accelerator = SimpleNamespace(_models=list(models))
    trainer = SimpleNamespace(
        accelerator=accelerator, model=model, model_wrapped=None if wrapped else model, is_fsdp_enabled=fsdp
    )

    def evaluate(trainer):
        accelerator._models.append(model)
        return "metrics"

    assert trainer_module._evaluation_loop(evaluate, trainer) == "metrics"
    assert (accelerator._models == []) == forgotten
    assert model._is_accelerate_prepared == (not forgotten)


def test_a_whole_batch_is_refused_only_where_gradients_are_computed():
    check = sys.modules[_digest.__module__].AcceleratorRanks._check_whole
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"inside `with accelerator\.maybe_context_parallel"):
        check(model)
    with torch.no_grad():
        check(model)
    check(model.eval())
