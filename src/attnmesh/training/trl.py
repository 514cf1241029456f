"""TRL's trainers of preferences, rewards, policies and students over ranks: DPO, KTO, ORPO, Reward, GRPO, RLOO, GKD.

Their losses are functions of whole rows: of a few numbers per token, such as log-probabilities. So the trainers keep
whole rows on every rank, and the models that they call are sharded. A call computes this rank's tokens, gathers the
numbers per token, and never logits; every rank then computes the whole loss (`whole_rows`). The gradients of gathered
numbers are summed over ranks, and DDP and FSDP2 average the gradients of weights: the loss counts once.

The ranks of a sequence are one process to such a trainer: `DataRanks` are what it gathers over.
GKD compares two distributions over the vocabulary for each token: its loss is the sum of the ranks' sums over tokens.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnmesh.generation.generator import generate
from attnmesh.generation.sampling import MAX_SEED, Sampling
from attnmesh.integrations.sharded_pass import checked_on_all_ranks
from attnmesh.integrations.transformers_attention import Patches
from attnmesh.integrations.transformers_models import IGNORED_LABEL, text_backbone
from attnmesh.training.accelerate import (
    AcceleratorRanks,
    check_kind,
    data_group,
    gather_objects_over,
    gather_over,
    gather_over_batches,
    ranks_of,
    shards,
)
from attnmesh.training.batch import gather_log_probs
from attnmesh.utils.optional import require

__all__: list[str] = []

# The methods of trainers that call models with whole rows.
_CALL_MODELS = {
    "DPOTrainer": ("compute_loss", "_precompute_ref_logps"),
    "KTOTrainer": ("compute_loss", "_precompute_ref_logps"),
    "ORPOTrainer": ("get_batch_loss_metrics",),
    "RewardTrainer": ("compute_loss",),
    "GRPOTrainer": ("compute_loss", "_generate_and_score_completions"),
    "RLOOTrainer": ("compute_loss", "_generate_and_score_completions"),
    "GKDTrainer": ("compute_loss",),
}
# What a fused LM head returns for each token.
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
_MISSING = object()
_GATHER = ("gather", "gather_object")  # functions of accelerate that trainers import


def patch_trainer(patches: Patches, name: str, module: ModuleType) -> None:
    """Let a trainer of TRL compute over the ranks of an accelerator. `module` has it, or its configuration."""
    if module.__name__.endswith("_config"):
        patches.replace(getattr(module, name.replace("Trainer", "Config")), "__post_init__", _post_init)
        return
    trainer = getattr(module, name)
    if name == "GKDTrainer":
        patches.replace(trainer, "__init__", _distillation_init)
        patches.replace(trainer, "compute_loss", _distillation_loss)
    for method in _CALL_MODELS[name]:
        patches.replace(trainer, method, _with_whole_rows)
    patches.replace(trainer, "floating_point_ops", _floating_point_ops)
    if name == "RewardTrainer":
        patches.replace(trainer, "__init__", _reward_init)
    if name == "ORPOTrainer":
        patches.replace(trainer, "concatenated_forward", _concatenated_forward)
    if name in ("GRPOTrainer", "RLOOTrainer"):
        patches.replace(trainer, "__init__", _policy_init)
        patches.replace(trainer, "_generate_single_turn", _generate_single_turn)
        patches.replace(trainer, "_calculate_rewards", _calculate_rewards)


def _with_whole_rows(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a trainer whose models compute whole rows over the ranks."""
    if not shards(self):
        return original(self, *args, **kwargs)
    with whole_rows(self):
        return original(self, *args, **kwargs)


def _floating_point_ops(original: Callable[..., Any], self: Any, inputs: Any) -> float:
    """Trainer.floating_point_ops, whose sum over ranks counts whole rows once."""
    found: float = original(self, inputs)
    return found / self.get_cp_size() if shards(self) else found


# Whole rows.


@contextmanager
def whole_rows(trainer: Any) -> Iterator[None]:
    """The models of a trainer compute whole rows over the ranks, and it gathers over `DataRanks`."""
    accelerator = trainer.accelerator
    ranks, data = ranks_of(accelerator), DataRanks(accelerator)
    with checked_on_all_ranks(ranks.cp.comm, "a trainer of TRL"):
        check_kind(trainer)
        model = ranks.model(trainer.model)
        if text_backbone(model) is not None:
            raise ValueError(
                f"the model must be one of text for {type(trainer).__name__} under context parallelism, got "
                f"{type(model).__name__}, which takes images"
            )
    base = next(each for each in type(trainer).__mro__ if each.__name__ in _CALL_MODELS)
    module = sys.modules[base.__module__]
    with ExitStack() as stack:
        for name in ("model", "ref_model", "teacher_model"):
            if (model := getattr(trainer, name, None)) is not None:
                stack.enter_context(_sharded_calls(ranks, model))
        stack.enter_context(ranks.context())
        for name in _GATHER:
            if hasattr(module, name):
                stack.enter_context(_replaced(module, name, getattr(data, name)))
        stack.enter_context(_replaced(trainer, "accelerator", data))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value in this context."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class DataRanks:
    """An accelerator whose ranks of a sequence are one process: they have the same rows, which count once."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self._group = accelerator, data_group(accelerator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    @property
    def num_processes(self) -> int:
        """The number of ranks that have different rows."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def process_index(self) -> int:
        """Which of the ranks that have different rows this one is."""
        return 0 if self._group is None else dist.get_rank(self._group)

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`."""
        operations = require("accelerate.utils.operations", extra="hf")
        return operations.recursively_apply(partial(gather_over, self._group), tensor)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """As `Accelerator.gather_for_metrics`."""
        return gather_over_batches(self._accelerator, ranks_of(self._accelerator), data, use_gather_object)

    def gather_object(self, objects: list[Any]) -> list[Any]:
        """As accelerate's function."""
        return gather_objects_over(self._group, objects)

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        """As `Accelerator.reduce` of a tensor."""
        total = gather_over(self._group, tensor[None]).sum(0) * scale
        return total / self.num_processes if reduction == "mean" else total


@contextmanager
def _sharded_calls(ranks: AcceleratorRanks, module: nn.Module) -> Iterator[None]:
    """Calls of a model with whole rows compute this rank's tokens, and return what is gathered from all of them."""
    model = ranks.model(module)
    if _is_classifier(model):
        prepare_classifier(ranks, model)
        hooks = [
            model.register_forward_pre_hook(partial(_shard_classifier, ranks), prepend=True, with_kwargs=True),
            model.base_model.register_forward_pre_hook(partial(_shard_ids, ranks), prepend=True, with_kwargs=True),
            model.score.register_forward_hook(partial(_gather_scores, ranks)),
        ]
    else:
        ranks.prepare(module)
        hooks = [
            model.register_forward_pre_hook(partial(_shard_rows, ranks), prepend=True, with_kwargs=True),
            model.register_forward_hook(partial(_gather_rows, ranks)),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shard_rows(ranks: AcceleratorRanks, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a model with a fused LM head, of this rank's tokens."""
    if not kwargs.get("fused_lm_head") or "attention_pass" in kwargs:
        return None
    local = ranks.shard_batch(kwargs)
    ranks.current_pass = local["attention_pass"]
    del local["labels"], local["num_items_in_batch"]  # shift_labels are the labels; the trainer computes the loss
    return (), local


def _gather_rows(ranks: AcceleratorRanks, model: nn.Module, args: Any, output: Any) -> Any:
    """The output of a fused LM head with one number per token of whole rows."""
    attention_pass, ranks.current_pass = ranks.current_pass, None
    if attention_pass is None or not hasattr(output, "log_probs"):
        return None
    local = {name: x for name in _PER_TOKEN if (x := getattr(output, name)) is not None}
    numbers = torch.stack([x.to(output.log_probs.dtype) for x in local.values()], -1)
    # The last token of a row has no label. TRL leaves it out.
    whole = attention_pass.unshard(numbers)[:, :-1].unbind(-1)
    gathered = {
        name: each.to(x.dtype) if x.requires_grad else each.detach().to(x.dtype)
        for (name, x), each in zip(local.items(), whole, strict=True)
    }
    return type(output)(**{**output, **gathered, "loss": None})


# Reward models: a score of the last token of each row.


def _is_classifier(model: nn.Module) -> bool:
    generic = require("transformers.modeling_layers", extra="hf").GenericForSequenceClassification
    return isinstance(model, generic) and type(model).forward is generic.forward


def _reward_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """RewardTrainer.__init__; its model is prepared here, as accelerate prepares language models only."""
    original(self, *args, **kwargs)
    if shards(self):
        ranks = ranks_of(self.accelerator)
        model = ranks.model(self.model)
        with checked_on_all_ranks(ranks.cp.comm, "RewardTrainer"):
            if not _is_classifier(model):
                raise ValueError(
                    f"the model of RewardTrainer must score the last token of a row as Transformers' "
                    f"GenericForSequenceClassification does, got {type(model).__name__}"
                )
        prepare_classifier(ranks, model)


def prepare_classifier(ranks: AcceleratorRanks, model: Any) -> None:
    """Let the layers of a sequence classifier attend over the ranks."""
    if not ranks.has_prepared(model):
        ranks.prepare(model.base_model)
        ranks.mark_prepared(model)


def _shard_classifier(ranks: AcceleratorRanks, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a classifier: whole rows of ids, in which it looks for the last token, and a sharded pass."""
    given = {name: x for name, x in kwargs.items() if name != "margin"}  # of RewardTrainer, which no model reads
    local = ranks.shard_batch(given)
    attention_pass = ranks.current_pass = local["attention_pass"]
    attention_pass.gathers_scores = True
    return args, {**local, "input_ids": kwargs["input_ids"]}


def _shard_ids(ranks: AcceleratorRanks, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of the layers of a classifier, of this rank's tokens."""
    assert ranks.current_pass is not None
    ids, *others = args
    return (ranks.current_pass.shard(ids), *others), kwargs


def _gather_scores(ranks: AcceleratorRanks, head: nn.Module, args: Any, scores: Tensor) -> Tensor:
    """The scores of all tokens, of which a classifier takes the last one."""
    attention_pass, ranks.current_pass = ranks.current_pass, None
    assert attention_pass is not None
    return attention_pass.unshard(scores)


# ORPO, which has no fused LM head.


def _concatenated_forward(original: Callable[..., Any], self: Any, model: Any, batch: dict[str, Any]) -> Any:
    """ORPOTrainer.concatenated_forward: log-probabilities of whole rows, and the mean of the logits of each token.

    The logits of padding depend on the kernel, and are left out.
    """
    if not shards(self):
        return original(self, model, batch)
    ranks = ranks_of(self.accelerator)
    whole = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
    ids, mask, labels = (whole[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
    tokens = ids.masked_fill(mask != 1, IGNORED_LABEL)  # the likelihood of the prompt counts, too
    with checked_on_all_ranks(ranks.cp.comm, "ORPOTrainer"):
        if self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be False under context parallelism, got True")
        if ((labels != IGNORED_LABEL) & (labels != tokens)).any():
            raise ValueError("labels must be -100 or the token itself under context parallelism, got others")
    local = ranks.shard_batch({"input_ids": ids, "attention_mask": mask, "labels": tokens})
    attention_pass = ranks.current_pass = local["attention_pass"]
    del local["labels"], local["num_items_in_batch"]
    of_tokens = {"attention_pass": attention_pass, "shift_labels": local.pop("shift_labels")}
    outputs = model(**local, **({"output_router_logits": True} if self.aux_loss_enabled else {}))
    # The last token of a row has no label.
    log_probs = gather_log_probs(of_tokens, outputs.logits)[:, :-1]
    mean_logits = attention_pass.unshard(outputs.logits.detach().float().mean(-1))[:, :-1]
    rows, answer = len(batch["chosen_labels"]), labels[:, 1:] != IGNORED_LABEL
    real = tokens[:, 1:] != IGNORED_LABEL
    nll = -(log_probs * real)[:rows].sum() / real[:rows].sum()
    means = (log_probs * answer).sum(-1) / answer.sum(-1)
    logits = (mean_logits[:rows][real[:rows]], mean_logits[rows:][real[rows:]])
    found = (means[:rows], means[rows:], *logits, nll)
    return (*found, outputs.aux_loss) if self.aux_loss_enabled else found


# GRPO and RLOO, which generate in a step.


def _post_init(original: Callable[..., Any], self: Any) -> None:
    """The __post_init__ of a configuration: the ranks of a sequence have the same prompts, and are not refused."""
    parallelism = self.parallelism_config
    if parallelism is None or not parallelism.cp_enabled or parallelism.sp_enabled:
        original(self)
        return
    of_class = type(self).world_size
    data_world = property(lambda self: of_class.fget(self) // parallelism.cp_size)
    self.parallelism_config = None
    try:
        with _replaced(type(self), "world_size", data_world):
            original(self)
    finally:
        self.parallelism_config = parallelism


def _policy_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """The __init__ of a trainer that generates: the ranks of a sequence have the same random state."""
    original(self, *args, **kwargs)
    self._attnmesh_generations = 0
    if not shards(self):
        return
    ranks, data = ranks_of(self.accelerator), DataRanks(self.accelerator)
    with checked_on_all_ranks(ranks.cp.comm, type(self).__name__):
        _check_policy(self)
    require("accelerate.utils", extra="hf").set_seed(self.args.seed + data.process_index)


def _check_policy(trainer: Any) -> None:
    """Raise ValueError for options of generation that are not served."""
    arguments = trainer.args
    if arguments.parallelism_config is None:
        raise ValueError(
            f"parallelism_config must be given to the arguments of {type(trainer).__name__}, which count the ranks of "
            "a sequence once in generation_batch_size, got None"
        )
    for name in (
        "use_vllm", "use_transformers_continuous_batching", "cache_implementation", "generation_kwargs",
    ):  # fmt: skip
        if getattr(arguments, name, None):
            raise ValueError(
                f"{name} must not be set under context parallelism, where attnmesh generates, got "
                f"{getattr(arguments, name)!r}"
            )
    for name in ("tools", "rollout_func", "environment_factories"):
        if getattr(trainer, name, None):
            raise ValueError(f"{name} must be None under context parallelism, got {getattr(trainer, name)!r}")
    _check_whole_weights(trainer)


def _check_whole_weights(trainer: Any) -> None:
    if trainer.is_fsdp_enabled:
        raise ValueError(
            f"fsdp must not be set for {type(trainer).__name__} under context parallelism, where each rank generates "
            "with the weights of the model that is trained, got FSDP: use DDP"
        )


def _generate_single_turn(
    original: Callable[..., Any], self: Any, prompt_ids: list[list[int]], images: Any, *args: Any, **kwargs: Any
) -> Any:
    """The completions of a generation batch, generated over the ranks of a sequence with the weights of the model."""
    if not shards(self):
        return original(self, prompt_ids, images, *args, **kwargs)
    ranks = ranks_of(self.accelerator)
    model = ranks.model(self.model_wrapped)
    with checked_on_all_ranks(ranks.cp.comm, type(self).__name__):
        if images is not None:
            raise ValueError("prompts must be text under context parallelism, got images")
    completions = _generate(
        ranks, model, prompt_ids,
        Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty, seed=_seed(self, DataRanks(self.accelerator).process_index),
        ),
        self.max_completion_length, self.eos_token_ids,
    )  # fmt: skip
    # GRPO takes their log-probabilities, too, which it computes itself if there are none.
    return (completions, None) if "num_generations" in inspect.signature(original).parameters else completions


def _seed(trainer: Any, data_rank: int) -> int:
    """A seed for every generation batch of each of the ranks that have different prompts."""
    trainer._attnmesh_generations += 1
    numbers = trainer.args.seed, data_rank, trainer.state.global_step, trainer._attnmesh_generations
    return random.Random(repr(numbers)).randint(0, MAX_SEED)


def _generate(
    ranks: AcceleratorRanks, model: Any, prompts: list[list[int]], sampling: Sampling, max_new_tokens: int,
    stop: list[int],
) -> list[list[int]]:  # fmt: skip
    """The answers to prompts, the same on all ranks of a sequence; the KV cache is sharded over them."""
    answers: list[list[int]] = [[] for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        # accelerate casts keys and values within `forward`; the KV cache has the dtype of the weights.
        with _replaced(model, "forward", vars(model).get("_original_forward", model.forward)):
            for token in generate(
                model, None, prompts, ranks.cp.comm, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop
            ):
                answers[token.row].append(token.id)
    finally:
        model.train(was_training)
    return answers


def _calculate_rewards(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The rewards that the first rank of a sequence computes: a function may return other values each time."""
    rewards: Tensor = original(self, *args, **kwargs)
    if not shards(self):
        return rewards
    comm = ranks_of(self.accelerator).cp.comm
    return comm.all_gather(rewards.contiguous(), [tuple(rewards.shape)] * comm.world)[0]


# GKD, which compares the student with a teacher.


def _distillation_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """GKDTrainer.__init__; answers of the student, or of the teacher, are generated over the ranks of a sequence."""
    original(self, *args, **kwargs)
    self._attnmesh_generations = 0
    if not shards(self):
        return
    with checked_on_all_ranks(ranks_of(self.accelerator).cp.comm, type(self).__name__):
        if self.lmbda > 0 or self.seq_kd:
            _check_whole_weights(self)
    self.generate_on_policy_outputs = partial(_on_policy_outputs, self)


def _on_policy_outputs(trainer: Any, module: Any, inputs: dict[str, Tensor], configuration: Any) -> tuple[Tensor, ...]:
    """GKDTrainer.generate_on_policy_outputs: prompts with answers, which are real, and which are labels."""
    ranks = ranks_of(trainer.accelerator)
    model = ranks.model(module)
    ranks.prepare(model)
    prompts, real = inputs["prompts"], inputs["prompt_attention_mask"].bool()
    stop = configuration.eos_token_id
    seed = _seed(trainer, DataRanks(trainer.accelerator).process_index)
    answers = _generate(
        ranks, model, [ids[kept].tolist() for ids, kept in zip(prompts, real, strict=True)],
        Sampling(configuration.temperature, configuration.top_p, seed, configuration.top_k or 0),
        configuration.max_new_tokens, [] if stop is None else [stop] if isinstance(stop, int) else list(stop),
    )  # fmt: skip
    shape = len(answers), max(map(len, answers))
    ids, kept = prompts.new_full(shape, configuration.pad_token_id), torch.zeros_like(prompts[:1, :1]).repeat(shape)
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = ids.new_tensor(answer)
        kept[row, : len(answer)] = 1
    labels = torch.cat([torch.full_like(prompts, IGNORED_LABEL), ids.masked_fill(kept == 0, IGNORED_LABEL)], 1)
    return torch.cat([prompts, ids], 1), torch.cat([inputs["prompt_attention_mask"], kept], 1), labels


def _distillation_loss(
    original: Callable[..., Any], self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    """GKDTrainer.compute_loss: every rank compares the distributions of its tokens."""
    if not shards(self):
        return original(self, model, inputs, return_outputs, num_items_in_batch)
    ranks = ranks_of(self.accelerator)
    with checked_on_all_ranks(ranks.cp.comm, "GKDTrainer"):
        if return_outputs:
            raise ValueError("prediction_loss_only must be True for GKDTrainer under context parallelism, got False")
    count = (inputs["labels"][:, 1:] != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    local = ranks.shard_batch({name: inputs[name] for name in ("input_ids", "attention_mask", "labels")})
    labels = local.pop("shift_labels")
    del local["labels"], local["num_items_in_batch"]
    student = model(**local).logits
    self.teacher_model.eval()
    with torch.no_grad():
        teacher = self.teacher_model(**local).logits
    items = torch.as_tensor(count, device=labels.device).clamp(min=1)
    part = self.generalized_jsd_loss(student, teacher, labels=labels, beta=self.beta, num_items_in_batch=items)
    comm = ranks.cp.comm
    total = torch.stack(list(comm.all_gather(part.detach()[None], [(1,)] * comm.world))).sum()
    # The loss of the whole batch, with the gradient of this rank's part: DDP and FSDP2 divide by the number of ranks.
    return comm.world * (part - part.detach()) + total
