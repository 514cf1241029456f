"""Training runs of tiny models in one process and over ranks, with what a trainer logs about them."""

from __future__ import annotations

import copy
import fcntl
import importlib
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from helpers.processes import Died, Raised, _context, _rank_main, _result

VOCABULARY = 64
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Processes.


TRAINERS = ("datasets", "peft", "transformers.trainer", "trl.trainer.sft_trainer")


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, imports: Sequence[str] = TRAINERS, timeout: float = 500
) -> list[Any]:
    """Return `fn(comm, *args)` of every rank, as `run_processes`, after imports that take seconds.

    One process imports them, and the ranks are forks of it.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_fork_ranks, args=(theirs, world, store.port, fn, args, imports, timeout))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout + 60):
            raise TimeoutError(f"ranks had no result after {timeout + 60} s")
        results = _result(ours, process)
    finally:
        process.kill()
        process.join()
    if not isinstance(results, list):
        raise AssertionError(f"the ranks failed: {results}")
    return results


def _fork_ranks(pipe: Any, world: int, port: int, fn: Any, args: Any, imports: Sequence[str], timeout: float) -> None:
    for name in imports:
        importlib.import_module(name)
    if "datasets" in imports:
        sys.modules["datasets"].disable_progress_bars()
        sys.modules["transformers"].logging.set_verbosity_error()
    context = mp.get_context("fork")
    pipes, processes, results, failed = [], [], [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        of_rank = theirs, rank, world, port, fn, args, "gloo"
        process = context.Process(target=_rank_main, args=of_rank, kwargs={"limit": 200}, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank, ours in enumerate(pipes):
            if not ours.poll(20 if failed else timeout):
                failed.append(f"rank {rank} had no result after {timeout} s")
                continue
            result = _result(ours, processes[rank])
            if isinstance(result, Raised | Died):  # the others may only report that a rank is gone
                failed.append(f"rank {rank}: {getattr(result, 'traceback', result)}")
            results.append(result)
    finally:
        for process in processes:
            process.kill()
            process.join()
    pipe.send("\n".join(failed) if failed else results)
    with suppress(EOFError, ConnectionError):
        pipe.recv()  # until the test ends this process: it serves the memory of the tensors among the results


def shared_result(factory: Any, name: str, compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`, which runs once for all workers of a test session."""
    folder = factory.getbasetemp()
    folder = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    path = folder / f"{name}.pickle"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
    return pickle.loads(path.read_bytes())


@contextmanager
def accelerate_ranks(world: int) -> Iterator[None]:
    """Let accelerate see all ranks of the default process group, or with `world=1` a single process."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        for name in list(os.environ):
            if name in _ENVIRONMENT or name.startswith(("ACCELERATE_", "FSDP_")):
                del os.environ[name]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    if world > 1:
        rank = str(dist.get_rank())
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        forget()


# Models and data.

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "llama4_text": {
        "attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": [],
        "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"],
        "attn_temperature_tuning": False,
    },
    "bamba": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
        "mamba_chunk_size": 16, "attn_layer_indices": [1],
    },
    "qwen3_5_text": {
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}  # fmt: skip


def training_model(kind: str = "llama", **changes: Any) -> Any:
    """Return a random model; the same for the same arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**_SIZES, **_OWN.get(kind, {}), **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.1)
    return model


def random_rows(count: int, seed: int = 0, low: int = 5, high: int = 24) -> list[dict[str, list[int]]]:
    """Return rows of random lengths, most of which 2 does not divide evenly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows that are read one after another."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def padded_batch(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the first row of a batch on the left and the others on the right.

    The first token of a row is not learned: before it is padding, and what that attends to depends on the kernel.
    """
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        begin = length - n if i == 0 else 0
        ids[i, begin : begin + n] = torch.tensor(row["input_ids"])
        mask[i, begin : begin + n] = 1
    learned = mask.clone()
    learned[:, 1:] *= mask[:, :-1]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(learned == 0, -100)}


def _logged(trainer: Any) -> list[dict[str, float]]:
    timed = ("runtime", "samples_per_second", "steps_per_second", "preparation_time")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def _arguments(folder: str, world: int, changes: dict[str, Any]) -> dict[str, Any]:
    from accelerate import ParallelismConfig

    changes = dict(changes)
    cp = changes.pop("cp", world)
    if world == 1:
        changes.pop("fsdp", None)
    given = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "max_steps": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no", "learning_rate": 0.3,
        "disable_tqdm": True, "optim": "sgd", "eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True,
        "bf16": False, "dataloader_pin_memory": False, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    if world > 1:
        given["parallelism_config"] = ParallelismConfig(cp_size=cp, dp_shard_size=world // cp)
    return {**given, **changes}


def trainer_log(
    world: int,
    kind: str = "llama",
    *,
    eval_rows: int = 5,
    streamed: bool = False,
    resume: Any = None,
    evaluate_first: bool = False,
    own_loss: Any = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return what Transformers' Trainer logs: losses, evaluation losses and gradient norms.

    `own_loss` is the `compute_loss` of a subclass. `more` are further arguments of the Trainer; without them, `changes`
    are arguments of the training.
    """
    from transformers import Trainer, TrainingArguments

    source = Stream if streamed else list
    with accelerate_ranks(world), tempfile.TemporaryDirectory() as folder:
        kind_of_trainer = type("OwnTrainer", (Trainer,), {"compute_loss": own_loss}) if own_loss else Trainer
        trainer = kind_of_trainer(
            model=training_model(kind), args=TrainingArguments(**_arguments(folder, world, changes)),
            train_dataset=source(random_rows(16)), eval_dataset=source(random_rows(eval_rows, seed=1)),
            data_collator=padded_batch,
            **(more or {}),
        )  # fmt: skip
        if evaluate_first:
            trainer.evaluate()
            copies = [copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))]
            assert all(type(each) is type(trainer.model) for each in copies)
        trainer.train(resume_from_checkpoint=resume)
        sharded = type(next(trainer.model.parameters())).__name__ == "DTensor"
        assert sharded == (world > 1 and bool(changes.get("fsdp")))
        return _logged(trainer)


def image_log(world: int, kind: str, **changes: Any) -> Any:
    """Return what Transformers' Trainer logs for a model with images."""
    from transformers import Trainer, TrainingArguments

    from helpers.vision_models import batch, small_model

    changes = {"learning_rate": 0.01, "remove_unused_columns": False, "eval_strategy": "no", **changes}
    with accelerate_ranks(world), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=small_model(kind, "eager"), args=TrainingArguments(**_arguments(folder, world, changes)),
            train_dataset=[{"seed": seed} for seed in range(8)],
            data_collator=lambda rows: batch(kind, seed=rows[0]["seed"]),
        )  # fmt: skip
        trainer.train()
        return _logged(trainer)


def image_loop_log(world: int, kind: str) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of a loop with `maybe_context_parallel` around a model with images."""
    from accelerate import Accelerator, ParallelismConfig

    from helpers.vision_models import batch, small_model

    with accelerate_ranks(world):
        config = ParallelismConfig(cp_size=world) if world > 1 else None
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        model = small_model(kind, "eager").train()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        log = []
        for seed in range(3):
            given = batch(kind, seed=seed)
            buffers = [x for x in given.values() if x.shape[:2] == given["input_ids"].shape]
            with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                loss = model(**given, use_cache=False).loss
                accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            if world > 1:
                dist.all_reduce(loss, group=accelerator.torch_device_mesh["dp_cp"].get_group())
            log.append({"loss": float(loss) / world, "grad_norm": norm})
        return log


@contextmanager
def files_of_a_training_step(number: int) -> Iterator[set[str]]:
    """Within it, collect the files of attnmesh that the call of this number of Trainer.training_step enters."""
    from transformers import Trainer

    import attnmesh

    root, original, calls, entered = f"{Path(attnmesh.__file__).parent}/", Trainer.training_step, count(1), set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.add(frame.f_code.co_filename.removeprefix(root))

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        sys.setprofile(note if next(calls) == number else None)
        try:
            return original(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    with patch.object(Trainer, "training_step", step):
        yield entered


def sft_trainer(folder: str, world: int, kind: str = "llama", *, peft: str | None = None, **changes: Any) -> Any:
    """Return TRL's SFTTrainer for rows of token ids."""
    from datasets import Dataset
    from peft import LoraConfig, PromptTuningConfig
    from trl import SFTConfig, SFTTrainer

    from helpers.models import tiny_tokenizer

    adapters = {
        "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<unk>"
    given = {"packing": True, "max_length": 40, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    return SFTTrainer(
        model=training_model(kind), args=SFTConfig(**_arguments(folder, world, {**given, **changes})),
        train_dataset=Dataset.from_list(random_rows(16)), eval_dataset=Dataset.from_list(random_rows(7, seed=1)),
        processing_class=tokenizer,
        peft_config=adapters[peft] if peft else None,
    )  # fmt: skip


def sft_log(world: int, kind: str = "llama", **changes: Any) -> Any:
    """Return what TRL's SFTTrainer logs."""
    with accelerate_ranks(world), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)  # LoRA's weights
        trainer = sft_trainer(folder, world, kind, **changes)
        trainer.train()
        return _logged(trainer)


# TRL's other trainers.

_LETTERS = list("abcdefghijkl")


def random_texts(count: int, seed: int, low: int, high: int) -> list[str]:
    """Return texts of random letters, one token each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [" ".join(_LETTERS[i] for i in torch.randint(12, (n,), generator=generator).tolist()) for n in lengths]


def preferences(count: int, seed: int = 0) -> dict[str, list[str]]:
    """Return prompts with a better and a worse answer, of lengths that differ."""
    names = {"prompt": (3, 9), "chosen": (3, 12), "rejected": (2, 14)}
    rows = {name: random_texts(count, seed + i, *lengths) for i, (name, lengths) in enumerate(names.items())}
    return {name: texts if name == "prompt" else [f" {text}" for text in texts] for name, texts in rows.items()}


def index_reward(completions: list[str], **_: Any) -> list[float]:
    """Reward letters "a" in an answer, and its place in a group: so answers that are equal differ, too."""
    return [text.count("a") + (0.7 * (i % 4)) % 1.0 for i, text in enumerate(completions)]


def _trl_data(kind: str, count: int, seed: int) -> dict[str, Any]:
    rows: dict[str, Any] = preferences(count, seed)
    if kind == "reward":
        rows["margin"] = [0.1 * i for i in range(count)]
    if kind == "kto":
        answers = rows["chosen"], rows["rejected"]
        rows["completion"] = [a if i % 2 else b for i, (a, b) in enumerate(zip(*answers, strict=True))]
        rows["label"] = [i % 3 != 0 for i in range(count)]
        rows = {name: rows[name] for name in ("prompt", "completion", "label")}
    if kind in ("grpo", "rloo"):
        rows = {"prompt": rows["prompt"]}
    return rows


def distillation_batch(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, and answers on the right, as GKDTrainer takes them."""
    letters = [[_LETTERS.index(x) + 3 for x in row["prompt"].split()] for row in rows]
    answers = [[_LETTERS.index(x) + 3 for x in row["chosen"].split()] for row in rows]
    widths = max(map(len, letters)), max(map(len, answers))
    ids = torch.zeros(len(rows), sum(widths), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(zip(letters, answers, strict=True)):
        whole = slice(widths[0] - len(prompt), widths[0] + len(answer))
        ids[i, whole], mask[i, whole] = torch.tensor(prompt + answer), 1
        labels[i, widths[0] : widths[0] + len(answer)] = torch.tensor(answer)
    prompts = {"prompts": ids[:, : widths[0]], "prompt_attention_mask": mask[:, : widths[0]]}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **prompts}


_GROUPS = {"num_generations": 2, "max_completion_length": 7, "beta": 0.1, "per_device_train_batch_size": 4}
_TRL = {
    "gkd": ("trl.experimental.gkd", "GKD", {"lmbda": 0.0, "max_new_tokens": 9}),
    "dpo": ("trl", "DPO", {}),
    "kto": ("trl", "KTO", {}),
    "orpo": ("trl.experimental.orpo", "ORPO", {}),
    "reward": ("trl", "Reward", {}),
    "grpo": ("trl", "GRPO", {**_GROUPS, "importance_sampling_level": "sequence"}),
    "rloo": ("trl", "RLOO", _GROUPS),
}  # fmt: skip


def _generated_alone(trainer: Any, kind: str, data_ranks: int, prompts: list[list[int]], *_: Any) -> Any:
    """Return answers as over ranks, whose data-parallel ranks have seeds of their own, unlike Transformers."""
    from attnmesh import Sampling, generate, register_attention, run_virtual
    from attnmesh.training.trl import _seed

    calls, count = getattr(trainer, "_attnmesh_generations", 0), len(prompts) // data_ranks
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    register_attention()
    model.set_attn_implementation("attnmesh")
    answers: list[list[int]] = [[] for _ in prompts]
    for rank in range(data_ranks):
        trainer._attnmesh_generations = calls
        sampling = Sampling(trainer.temperature, trainer.top_p, _seed(trainer, rank), trainer.top_k)
        (tokens,) = run_virtual(1, lambda comm, rank=rank, sampling=sampling: list(generate(
            model, None, prompts[rank * count :][:count], comm, max_new_tokens=trainer.max_completion_length,
            sampling=sampling, stop=trainer.eos_token_ids,
        )))  # fmt: skip
        for token in tokens:
            answers[rank * count + token.row].append(token.id)
    model.set_attn_implementation("eager")
    return answers if kind == "rloo" else (answers, None)


def _written_once(folder: str, world: int, name: str, write: Callable[[str], Any]) -> str:
    """Return where the first rank has written a folder, on every rank."""
    found = [f"{folder}/{name}"]
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    if world == 1 or dist.get_rank() == 0:
        write(found[0])
    if world > 1:
        dist.barrier()
    return found[0]


def trl_trainer(
    folder: str,
    world: int,
    kind: str,
    *,
    model: str = "llama",
    peft: bool = False,
    data_ranks: int = 1,
    sizes: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return one of TRL's trainers other than SFTTrainer."""
    from datasets import Dataset, load_from_disk
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from helpers.models import tiny_tokenizer

    module, name, own = _TRL[kind]
    trainers = importlib.import_module(module)
    given = {"gradient_checkpointing": False, "learning_rate": 0.05, **own}
    args = getattr(trainers, f"{name}Config")(**_arguments(folder, world, {**given, **changes}))
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<unk>"
    policy = training_model(model, **(sizes or {}))
    more: dict[str, Any] = {}
    if kind == "reward":
        policy = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model, **_SIZES, num_labels=1))
        for i, weight in enumerate(policy.parameters()):
            torch.nn.init.normal_(weight, 0, 0.3, torch.Generator().manual_seed(i))
    if kind in ("dpo", "kto") and not peft and "precompute_ref_log_probs" not in changes:
        more["ref_model"] = training_model(model, **(sizes or {}))
        for weight in more["ref_model"].parameters():
            weight.data.mul_(1.1)
    if kind in ("grpo", "rloo"):
        more["reward_funcs"] = index_reward
        policy.config._name_or_path = _written_once(folder, world, "reference", policy.save_pretrained)
    if kind == "gkd":
        more |= {"teacher_model": training_model("mistral"), "data_collator": distillation_batch}
        for weight in more["teacher_model"].parameters():
            weight.data.mul_(2)
    if peft:
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    data = {  # TRL writes log-probabilities of a reference model beside it
        split: load_from_disk(_written_once(folder, world, split, Dataset.from_dict(rows).save_to_disk))
        for split, rows in (("train", _trl_data(kind, 12, 0)), ("eval", _trl_data(kind, 4, 5)))
    }
    trainer = getattr(trainers, f"{name}Trainer")(
        model=policy, args=args, processing_class=tokenizer, train_dataset=data["train"], eval_dataset=data["eval"],
        **more,
    )  # fmt: skip
    if kind in ("grpo", "rloo") and world == 1:
        trainer._generate_single_turn = partial(_generated_alone, trainer, kind, data_ranks)
    if kind == "gkd":
        trainer.generation_config.top_k = 1  # so that the answers do not depend on random numbers
    return trainer


def trl_log(world: int, kind: str, **changes: Any) -> Any:
    """Return what one of TRL's trainers other than SFTTrainer logs."""
    with accelerate_ranks(world), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)  # LoRA's weights
        try:
            trainer = trl_trainer(folder, world, kind, **changes)
            trainer.train()
        finally:
            if world > 1:  # until here, other ranks may read the folder of the first one
                dist.barrier()
        return [{name: value for name, value in entry.items() if name != "step_time"} for entry in _logged(trainer)]


# accelerate without a trainer.


def packed_positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def loop_batches() -> list[dict[str, torch.Tensor]]:
    """Return batches as users pass them: plain, padded, packed, and with labels that are shifted before."""
    padded = padded_batch(random_rows(2, seed=3))
    ids = torch.tensor([random_rows(1, seed=4, low=23, high=24)[0]["input_ids"]])
    packed = {"input_ids": ids, "labels": ids.clone(), "position_ids": packed_positions([9, 3, 11])}
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    plain = {"input_ids": ids.clone(), "labels": ids.clone()}
    return [plain, padded, packed, {**plain, "shift_labels": shifted, "position_ids": torch.arange(23)[None]}]


def loop_log(world: int, kind: str = "mistral", *, fsdp: bool = False) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of a loop as in accelerate's example of context parallelism."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    with accelerate_ranks(world):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp and world > 1 else None
        config = ParallelismConfig(cp_size=world) if world > 1 else None
        accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
        model = training_model(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        loader = torch.utils.data.DataLoader(loop_batches(), batch_size=None)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert not plugin or type(next(model.parameters())).__name__ == "DTensor"
        log = []
        for batch in loader:
            buffers, before = list(batch.values()), [x.clone() for x in batch.values()]
            with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                loss = model(**batch, use_cache=False).loss  # with a cache, one process does not separate documents
                accelerator.backward(loss)
            assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            if world > 1:
                dist.all_reduce(loss, group=accelerator.torch_device_mesh["dp_cp"].get_group())
            log.append({"loss": float(loss) / world, "grad_norm": norm})
        return log


def packed_logits(world: int, kind: str = "mistral") -> list[Any]:
    """Return where the documents of a packed batch of SFTTrainer begin, and its logits for two second documents.

    In one process, the model computes every document by itself.
    """
    with accelerate_ranks(world), tempfile.TemporaryDirectory() as folder:
        trainer = sft_trainer(folder, world, kind)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        changed["input_ids"][:, starts[1] : starts[2]] = (batch["input_ids"][:, starts[1] : starts[2]] + 1) % VOCABULARY
        model = trainer.model.eval()
        logits = []
        for x in (batch, changed):
            if world > 1:
                logits.append(trainer.prediction_step(model, x, False)[1].numpy())
                continue
            documents = x["input_ids"].tensor_split(starts[1:], dim=1)
            with torch.no_grad():
                logits.append(torch.cat([model(input_ids=document).logits for document in documents], 1).numpy())
        return [starts, *logits]
