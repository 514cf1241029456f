"""Tokens of language models over ranks equal one process, for every sharding, storage, window and loop option.

Small models with random weights answer a few prompts over all ranks and on a single one. Without a quantized cache,
greedy answers are also compared with Transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch

from attnmesh.comm import Comm, SoloComm
from attnmesh.generation.generator import Generator
from attnmesh.generation.moving import move_requests
from attnmesh.generation.sampling import Sampling
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.models.sharded import shard_model
from attnmesh.plan.decode import DecodeSharding
from attnmesh.testing.errors import Comparison
from attnmesh.utils.optional import installed
from attnmesh.verify.mode import Mode

_VOCABULARY, _WINDOW, _NEW_TOKENS = 96, 8, 10
_SIZES = {
    "vocab_size": _VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
_LATENTS = {
    "num_key_value_heads": 12, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """A model, the settings of its generator, and the options of its answers."""

    name: str
    kind: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    shard_weights: bool = False
    by_steps: bool = False  # submitted one after another
    moved: bool = False  # to a generator with another sharding, after a few steps

    @property
    def is_plain(self) -> bool:
        """Whether Transformers has the same tokens."""
        return "storage" not in self.settings and not {"sampling", "num_beams"} & set(self.options)


_CASES = (
    _Case("greedy"),
    _Case("submitted chunks", settings={"prefill_chunk": 32, "step_tokens": 48}, by_steps=True),
    _Case("window drafts", "mistral", options={"speculative": True}),
    _Case("int8 sampled", settings={"storage": "int8"}, options={"sampling": Sampling(0.9, 0.95, seed=3)}),
    _Case("fp8 drafts", settings={"storage": "fp8"}, options={"speculative": True}),
    _Case("bfp8 beams", settings={"storage": "bfp8"}, options={"num_beams": 2}),
    _Case("latents", "deepseek_v3", by_steps=True),
    _Case("few sequences", settings={"max_sequences": 1}),
    _Case("moved", by_steps=True, moved=True),
    _Case("sharded weights", shard_weights=True),
    _Case("sharded weights window submitted", "mistral", by_steps=True, shard_weights=True),
    _Case("sharded weights int8 beams", settings={"storage": "int8"}, options={"num_beams": 3}, shard_weights=True),
)


def token_modes(comm: Comm) -> Iterator[Mode]:
    """Yield every case, each on another sharding of the world size; none without Transformers."""
    if not installed("transformers"):
        return
    sizes = [n for n in range(1, comm.world + 1) if comm.world % n == 0]
    whole = [DecodeSharding(1, kvdp, comm.world // kvdp) for kvdp in sizes]
    fits = [tp for tp in sizes if comm.world <= 12 and (4 % tp == 0 or tp % 4 == 0)]
    parts = [DecodeSharding(tp, 1, comm.world // tp) for tp in fits]
    cycles = {False: cycle(whole), True: cycle(parts)}
    for case in _CASES:
        if parts or not case.shard_weights:
            sharding = next(cycles[case.shard_weights])
            shape = f"{len(_prompts(0))} prompts, {_NEW_TOKENS} tokens fp32"
            yield Mode(
                f"tokens {sharding} {case.name}", shape, partial(_compare, comm, sharding, case), collective=True
            )


def _prompts(seed: int) -> list[list[int]]:
    """Prompts of several lengths: one token, beyond a window, and two with a common prefix of full blocks."""
    generator = torch.Generator().manual_seed(seed)
    text: list[int] = torch.randint(3, _VOCABULARY, (140,), generator=generator, device="cpu").tolist()
    return [text[:1], text[5:36], text, [*text[:130], 5, 6]]


def _compare(comm: Comm, sharding: DecodeSharding, case: _Case, seed: int, device: str) -> list[Comparison]:
    """Compare the tokens of every rank with a single rank's, and with Transformers'."""
    model, prompts = _model(case.kind, seed, device), _prompts(seed)
    own = _answers(_generator(model, comm, sharding, case), prompts, case, comm)
    copies = comm.all_gather(own, [own.shape] * comm.world)
    if comm.rank > 0:
        return []
    alone = _answers(_generator(model, SoloComm(), DecodeSharding(), case), prompts, case, None)
    results = [Comparison(f"tokens of rank {rank}", copy, alone) for rank, copy in enumerate(copies)]
    if case.is_plain:
        results.append(Comparison("tokens of Transformers", own, _transformers(case.kind, seed, device, prompts)))
    return results


def _model(kind: str, seed: int, device: str, implementation: str = "attnmesh") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    more = _LATENTS if kind == "deepseek_v3" else {"sliding_window": _WINDOW} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, **{**_SIZES, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    return model.to(device).eval()


def _generator(model: Any, comm: Comm, sharding: DecodeSharding, case: _Case) -> Generator:
    if case.shard_weights and comm.world > 1:
        model = shard_model(model, sharding, comm)
    settings = {"cache_tokens": 600, "max_sequences": 12, **case.settings}
    return Generator(model, None, comm, sharding=sharding, **settings)


def _answers(generator: Generator, prompts: list[list[int]], case: _Case, comm: Comm | None) -> torch.Tensor:
    """The tokens [prompts, _NEW_TOKENS] of a generator."""
    how = {"max_new_tokens": _NEW_TOKENS, "stop": (), **case.options}
    rows: list[list[int]] = [[] for _ in prompts]
    if not case.by_steps:
        for token in generator.generate(prompts, **how):
            rows[token.row].append(token.id)
    else:
        requests = []
        for prompt in prompts:
            requests.append(generator.submit(prompt, **how))
            generator.step()
        if case.moved and comm is not None:
            to = DecodeSharding(kvdp=comm.world) if generator.sharding.cp > 1 else DecodeSharding(cp=comm.world)
            other = _generator(generator.model, comm, to, case)
            requests = move_requests(generator, other, comm)
            generator = other
        while generator.num_unfinished:
            generator.step()
        rows = [request.ids for request in requests]
    return torch.tensor(rows, dtype=torch.int64, device=generator.engine.device)


@torch.no_grad()
def _transformers(kind: str, seed: int, device: str, prompts: list[list[int]]) -> torch.Tensor:
    """The tokens of Transformers' `generate`, with its own attention."""
    model = _model(kind, seed, device, "eager")
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_NEW_TOKENS,
            eos_token_id=_VOCABULARY + 1, pad_token_id=_VOCABULARY + 2,
        )  # fmt: skip
        rows.append(out[0, len(prompt) :].tolist())
    return torch.tensor(rows, dtype=torch.int64, device=device)
