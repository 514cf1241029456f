"""Train a small Llama with context parallelism: every rank holds all parameters and a shard of the tokens.

    python examples/train_context_parallel.py
    torchrun --nproc-per-node 2 examples/train_context_parallel.py
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --length 1001 --layout striped --dtype bf16
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_context_parallel.py --checkpoint checkpoints

Runs of one length print the same losses up to rounding: context parallelism changes where tokens are, not what is
computed. With `--checkpoint`, a run that failed continues from its last checkpoint, on any number of ranks, with the
losses of a run that did not fail; see docs/cluster.md. Any length works. The model is a Llama of Transformers with
random weights; nothing is downloaded. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
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


def save(file: Path, **state: object) -> None:
    """Write a checkpoint that is whole as soon as `file` exists: the program may be killed at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def load(file: Path, cp: ContextParallel, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Continue from a checkpoint, if there is one: the losses of the steps so far.

    Every rank holds all parameters, so a checkpoint does not depend on the number of ranks that wrote it.
    """
    losses = []
    if file.exists():
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    # All ranks must have read the same file. A difference raises ValueError on every rank.
    cp.comm.agree("checkpoint", {"steps": len(losses)})
    return losses


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """The loss of every step."""
    length = arguments.length
    cp = ContextParallel(layout=LAYOUTS[arguments.layout], schedule=arguments.schedule)
    model = small_llama(cp, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = cp.positions(length).to(device).unsqueeze(0)
    file = arguments.checkpoint and arguments.checkpoint / "checkpoint.pt"
    losses = load(file, cp, model, optimizer) if file else []
    for tokens in islice(batches(length + 1), len(losses), arguments.steps):  # skips the batches of finished steps
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
            if file and len(losses) % arguments.checkpoint_every == 0:
                save(file, model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses)
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
    parser.add_argument("--checkpoint", type=Path, help="folder to continue from and to write to, shared by all nodes")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps between checkpoints (default 5)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a rank waits for others (default 300)")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:  # started by torchrun
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=arguments.timeout))
    losses = train(arguments, device)
    if arguments.losses and os.environ.get("RANK", "0") == "0":
        arguments.losses.write_text(json.dumps(losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
