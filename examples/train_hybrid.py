"""Train a small hybrid model, Qwen3-Next or Bamba, in one process and over ranks: the losses are equal.

    python examples/train_hybrid.py
    python examples/train_hybrid.py --ranks 3 --model bamba --steps 4 --length 1001

The line that shards a batch is the same as for Llama: `model(**shard_inputs(cp, ids, ids))`. Recurrent layers pass
states between ranks; documents that are packed into a row do not see each other. The ranks are processes on this
machine, the weights are random, and nothing is downloaded. Needs `pip install "attnmesh[hf]"`; takes half a minute.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attnmesh as am
from attnmesh import launch
from attnmesh.comm import Comm

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "qwen3_next": {  # gated delta rule, three layers of four
        "num_hidden_layers": 4, "head_dim": 16, "num_experts": 0, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "bamba": {  # Mamba-2
        "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_expand": 2,
    },
}  # fmt: skip


def train(comm: Comm, kind: str, steps: int, length: int) -> list[float]:
    """The loss of every step: two rows, one of them with two documents."""
    am.register_attention()
    cp = am.ContextParallel(comm)
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES, **MODELS[kind]), attn_implementation="attnmesh"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    documents = [[length // 3, length - length // 3], [length]]
    losses = []
    for _ in range(steps):
        ids = torch.randint(1, 4, (2, length), generator=generator).cumsum(1) % SIZES["vocab_size"]
        loss = model(**am.shard_inputs(cp, ids, ids, document_lengths=documents)).loss  # this rank's share
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = comm.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach()).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small hybrid model in one process and over ranks.")
    parser.add_argument("--model", choices=MODELS, default="qwen3_next")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=203, help="tokens per sequence, any number (default 203)")
    parser.add_argument("--virtual", action="store_true", help="ranks on threads of this process")
    arguments = parser.parse_args()
    options = {"kind": arguments.model, "steps": arguments.steps, "length": arguments.length}
    alone = am.run_virtual(1, lambda comm: train(comm, **options))[0]
    several = launch.run(train, arguments.ranks, virtual=arguments.virtual, **options)[0]
    for step, (one, over_ranks) in enumerate(zip(alone, several, strict=True), 1):
        print(f"step {step}  one process {one:.5f}  {arguments.ranks} ranks {over_ranks:.5f}")
    assert all(abs(one - over_ranks) < 1e-4 * one for one, over_ranks in zip(alone, several, strict=True))
    print("The losses are equal up to rounding.")


if __name__ == "__main__":
    main()
