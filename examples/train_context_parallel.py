"""Train a small Llama with context parallelism: every rank holds all parameters and a shard of the tokens.

    python examples/train_context_parallel.py
    torchrun --nproc-per-node 2 examples/train_context_parallel.py
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --length 1001 --layout striped --dtype bf16

All of them print the same losses up to rounding: context parallelism changes where tokens are, not what is computed.
Any length works. The model is a Llama of Transformers with random weights; nothing is downloaded. Needs
`pip install "attnmesh[hf]"`.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from attnmesh import Causal, ContextParallel, Contiguous, Striped, Zigzag

VOCABULARY, BATCH = 128, 2
LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped()}


def small_llama(cp: ContextParallel, length: int) -> LlamaForCausalLM:
    """Two layers with grouped-query attention over the ranks of `cp`."""

    def attention(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        **_: object,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        # k and v have fewer heads than q, and keep them. Under autocast, rotary embeddings leave q and k in float32.
        out = cp.attention(q.to(v.dtype), k.to(v.dtype), v, mask=Causal(), scale=scaling, length=length)
        return out.transpose(1, 2), None

    # Transformers makes no mask for an unknown attention. For a known one it would treat the gaps between the positions
    # of a shard as boundaries of packed documents.
    AttentionInterface.register("attnmesh", attention)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, use_cache=False, attn_implementation="attnmesh",
        initializer_range=0.1,  # larger than usual, so that errors of attention show from the first step
    )  # fmt: skip
    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(config)


def batches(length: int) -> Iterator[Tensor]:
    """Learnable sequences, the same on every rank: a token is the previous one plus 1, 2 or 3."""
    generator = torch.Generator().manual_seed(1)
    while True:
        steps = torch.randint(1, 4, (BATCH, length), generator=generator)
        yield steps.cumsum(1) % VOCABULARY


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """The loss of every step."""
    length = arguments.length
    cp = ContextParallel(layout=LAYOUTS[arguments.layout], schedule=arguments.schedule)
    model = small_llama(cp, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = cp.positions(length).to(device).unsqueeze(0)
    losses = []
    for _, tokens in zip(range(arguments.steps), batches(length + 1), strict=False):
        # Shift before sharding: the label of the last token of a shard is in another shard.
        tokens, labels = (cp.shard(x, 1).to(device) for x in (tokens[:, :-1], tokens[:, 1:]))
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.dtype == "bf16"):
            logits = model(input_ids=tokens, position_ids=positions).logits
        # Divide by the global number of tokens: the losses of the ranks add up to the loss, and so do their gradients.
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * length)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = cp.comm.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(cp.comm.all_reduce(loss.detach()).item())
        if cp.rank == 0:
            print(f"step {len(losses):3}  loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with context parallelism.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=203, help="tokens per sequence, any number (default 203)")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    losses = train(arguments, device)
    if arguments.losses and os.environ.get("RANK", "0") == "0":
        arguments.losses.write_text(json.dumps(losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
