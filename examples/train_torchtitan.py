"""Train a tiny Llama 3 with torchtitan's Trainer, with attnmesh's attention over context-parallel ranks.

    torchrun --nproc-per-node 1 examples/train_torchtitan.py
    torchrun --nproc-per-node 4 examples/train_torchtitan.py --cp 4
    torchrun --nproc-per-node 4 examples/train_torchtitan.py --cp 2 --tp 2
    torchrun --nproc-per-node 4 examples/train_torchtitan.py --cp 2 --pp 2 --load-balancer ptrr

Documents of odd lengths are packed into rows. Context parallelism changes where tokens are, not what is computed: from
the same weights all of these compute the same losses, as `tests/stacks/test_torchtitan.py` shows. (torchtitan draws
other weights on one rank than on several.) Ranks besides those of `--cp`, `--tp` and `--pp` share the batch by FSDP.
Nothing is downloaded. Runs on CPU ranks, for which `on_cpu` replaces what torchtitan asks of a GPU. Needs
`pip install "attnmesh[torchtitan]"`.
"""

import argparse
import importlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

VOCABULARY, LENGTH, BATCH, STEPS = 128, 64, 4, 3


def on_cpu() -> None:
    """Let torchtitan run on CPU ranks over gloo. To be called before torchtitan is imported."""
    found = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        utils = importlib.import_module("torchtitan.tools.utils")
    finally:
        torch._utils._get_available_device_type = found
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None, device_count=lambda: 1, current_device=lambda: 0, synchronize=lambda: None,
        get_device_name=lambda device: "CPU", reset_peak_memory_stats=lambda: None, empty_cache=lambda: None,
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30), memory_stats=lambda device: {},
    )  # fmt: skip
    importlib.import_module("torchtitan.distributed.utils").set_pg_timeouts = lambda **options: None
    importlib.import_module("torchtitan.distributed.fsdp").disable_fsdp_gradient_division = sum_gradients


def sum_gradients(model: torch.nn.Module) -> None:
    """torchtitan's disable_fsdp_gradient_division, for gloo, which cannot multiply as it reduces."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


if not torch.cuda.is_available():
    on_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class RandomDocuments(BaseDataLoader):
    """Rows of random tokens, packed with documents of random lengths; position ids restart with every document."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **kwargs: object) -> None:
        self._ranks, self._rank, self._length = dp_world_size, dp_rank, seq_len
        self._rows = kwargs["local_batch_size"]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        numbers = torch.Generator().manual_seed(0)
        while True:
            rows = [self._row(numbers) for _ in range(BATCH)]  # of all ranks
            mine = rows[self._rank * BATCH // self._ranks : (self._rank + 1) * BATCH // self._ranks]
            for at in range(0, len(mine), self._rows):  # several microbatches for a pipeline
                tokens, positions = (torch.stack(x) for x in zip(*mine[at : at + self._rows], strict=True))
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def _row(self, numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (self._length + 1,), generator=numbers)
        cut = int(torch.randint(1, self._length // 2, (), generator=numbers))
        lengths = [cut, 7, self._length - cut - 7]
        return tokens, torch.cat([torch.arange(n) for n in lengths])

    def state_dict(self) -> dict[str, object]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Nothing to load."""


class NoTokenizer(BaseTokenizer):
    """The tokens are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **kwargs: object) -> None:
        super().__init__()

    def encode(self, *args: object, **kwargs: object) -> list[int]:
        """Not called."""
        raise NotImplementedError

    def decode(self, *args: object, **kwargs: object) -> str:
        """Not called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """The number of tokens."""
        return VOCABULARY


def tiny_llama3() -> ModelSpec:
    """Two layers of torchtitan's Llama 3, with grouped queries and FlexAttention."""
    dim, heads = 32, 4
    norm = RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT)
    model = llama3.Llama3Model.Config(
        dim=dim, vocab_size=VOCABULARY, norm=norm,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            n_layers=2, dim=dim, n_heads=heads, n_kv_heads=2, hidden_dim=64, attn_backend="flex",
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=LENGTH, theta=10000, scaling="llama"),
        ),
    )  # fmt: skip
    return ModelSpec(
        name="llama3", flavor="tiny", model=model, parallelize_fn=llama3.parallelize_llama, pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip


def config(cp: int, tp: int, pp: int, load_balancer: str | None, data_ranks: int, folder: str) -> Trainer.Config:
    """The config of a run; the first two arguments of it are all that attnmesh needs."""
    return Trainer.Config(
        override=OverrideConfig(imports=["attnmesh.training.torchtitan.flex_attention"]),
        parallelism=ParallelismConfig(
            context_parallel_degree=cp, context_parallel_load_balancer=load_balancer, spmd_backend="partial_dtensor",
            tensor_parallel_degree=tp, pipeline_parallel_degree=pp,
        ),
        model_spec=tiny_llama3(),
        training=TrainingConfig(
            local_batch_size=BATCH // data_ranks, seq_len=LENGTH, steps=STEPS, mixed_precision_param="float32",
            disable_cuda_graphs=pp > 1,
        ),
        dataloader=RandomDocuments.Config(),
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=folder,
    )  # fmt: skip


def with_microbatches(schedule: Any) -> None:
    """Let a schedule of torch 2.13 take a list of microbatches, as torchtitan passes it; later versions do."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step


def main() -> None:
    """Train three steps and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("cp", "tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--load-balancer", choices=("headtail", "ptrr"), default="headtail")
    given = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        run = config(
            given.cp, given.tp, given.pp, given.load_balancer, world // (given.cp * given.tp * given.pp), folder
        )
        trainer = run.build()
        trainer.metrics_processor.log = lambda step, loss, *rest, **more: print(
            f"rank {torch.distributed.get_rank()} step {step} loss {loss:.9f}", flush=True
        )
        if given.pp > 1:
            with_microbatches(trainer.pp_schedule)
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
