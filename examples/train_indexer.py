"""Train the indexer of sparse attention with its KL loss, on one rank or with the sequence sharded over ranks.

    python examples/train_indexer.py
    python examples/train_indexer.py --ranks 2                       # two virtual ranks in this process
    torchrun --nproc-per-node 2 examples/train_indexer.py            # processes

All of them print the same losses up to rounding. The attention layer is frozen. The indexer, a few small projections of
the layer's input, learns to select the 16 keys of every row with the largest attention weights. As in DeepSeek-V3.2 it
is trained in two stages: first with attention over all keys, then with attention over the keys that it selects. Every
step uses a new sequence; recall is measured on a held-out one. Runs on the CPU in under a minute. Needs
`pip install "attnmesh[plot]"`.
"""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attnmesh as am

LENGTH, HIDDEN, TOPICS = 256, 64, 8
HEADS, WIDTH, ATTN_SCALE = 4, 32, 0.7
INDEX_HEADS, INDEX_WIDTH, TOPK = 4, 16, 16
CAUSAL = am.SparseMask(causal=True)
CHANCE = sum(TOPK / (position + 1) for position in range(TOPK, LENGTH)) / (LENGTH - TOPK)  # recall of random keys


class Attention:
    """The frozen layer. Tokens attend to similar tokens, each head with a projection of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)  # the same layer on every rank
        self.topics = torch.randn(TOPICS, HIDDEN, generator=generator) / TOPICS**0.5
        self.to_kv = torch.randn(HIDDEN, WIDTH, generator=generator) / HIDDEN**0.5
        own = torch.randn(HEADS, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.to_q = torch.eye(WIDTH) + 0.3 * own

    def sequence(self, seed: int) -> Tensor:
        """An input [LENGTH, HIDDEN], the same on every rank: every token is a mixture of topics."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(LENGTH, TOPICS, generator=generator) @ self.topics
        return x + 0.1 * torch.randn(LENGTH, HIDDEN, generator=generator)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q [rows, HEADS, WIDTH] and the latent kv [rows, WIDTH], shared by all heads."""
        kv = x @ self.to_kv
        return torch.einsum("id,hde->ihe", kv, self.to_q), kv


class Indexer(nn.Module):
    """The inputs of `indexer_topk` and of the loss: queries, keys, and one weight per row and head."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, INDEX_HEADS * INDEX_WIDTH, bias=False)
        self.to_k = nn.Linear(HIDDEN, INDEX_WIDTH, bias=False)
        self.to_w = nn.Linear(HIDDEN, INDEX_HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach()  # its loss has no gradient for the rest of the model
        w = self.to_w(x) * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
        return self.to_q(x).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH)), self.to_k(x), w


class Point(NamedTuple):
    """Loss and recall after a number of steps."""

    step: int
    stage: str
    loss: float
    recall: float


class Trainer:
    """Trains on one rank's rows of every sequence."""

    def __init__(self, comm: am.comm.Comm) -> None:
        self.comm, self.layout = comm, am.Zigzag()  # every rank has early rows and late ones, which see more keys
        self.ranks = am.SparseParallel(cp=comm, length=LENGTH, layout=self.layout)
        self.attention = Attention()
        torch.manual_seed(0)  # the same indexer on every rank
        self.indexer = Indexer()
        self.optimizer = torch.optim.AdamW(self.indexer.parameters(), weight_decay=0.0)
        rows = self.layout.local_length(LENGTH, comm.world, comm.rank)
        self.every_key = torch.arange(LENGTH, dtype=torch.int32).expand(rows, -1)

    def own_rows(self, seed: int) -> Tensor:
        return self.layout.shard(self.attention.sequence(seed), 0, self.comm.world, self.comm.rank)

    def warm_up_loss(self, x: Tensor) -> Tensor:
        """The loss with attention over all keys."""
        q, kv = self.attention(x)
        _, lse = self.ranks.sparse_attention(q, kv, self.every_key, scale=ATTN_SCALE, mask=CAUSAL)
        return self.ranks.indexer_kl_loss(
            *self.indexer(x),
            indices=None,  # over all keys
            target=am.sparse.AttentionTarget(q, kv, lse, ATTN_SCALE),
            mask=CAUSAL,
            reduction="mean_rows",
        )

    def sparse_loss(self, x: Tensor) -> Tensor:
        """The loss with attention over the selected keys only."""
        q, kv = self.attention(x)
        iq, ik, w = self.indexer(x)
        selected = self.ranks.indexer_topk(iq, ik, w, TOPK, mask=CAUSAL).indices
        _, _, target = self.ranks.sparse_attention(
            q, kv, selected, scale=ATTN_SCALE, mask=CAUSAL, return_attn_sum=True
        )  # the first result is the input of the rest of a model; there is none here
        return self.ranks.indexer_kl_loss(iq, ik, w, selected, target, mask=CAUSAL, reduction="mean_rows")

    def update(self, loss: Tensor, rate: float) -> None:
        """One optimizer step. The loss is that of the whole sequence, a rank's gradients are those of its rows."""
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.indexer.parameters():
            parameter.grad = self.comm.all_reduce(parameter.grad)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def recall(self) -> float:
        """The share of the keys with the largest weights that are selected, over rows with more than TOPK keys."""
        x = self.own_rows(seed=1)
        q, kv = self.attention(x)
        _, _, mass = self.ranks.sparse_attention(
            q, kv, self.every_key, scale=ATTN_SCALE, mask=CAUSAL, return_attn_sum=True
        )
        selected = self.ranks.indexer_topk(*self.indexer(x), TOPK, mask=CAUSAL).indices
        found = (mass.topk(TOPK).indices[:, :, None] == selected[:, None]).any(2).float().mean(1)
        choice = self.layout.positions(LENGTH, self.comm.world, self.comm.rank) >= TOPK
        return self.comm.all_reduce(found[choice].sum()).item() / (LENGTH - TOPK)


def train(comm: am.comm.Comm, warm_up: int, sparse: int, every: int) -> list[Point]:
    """Loss and recall during training, the same on every rank."""
    trainer, last, points = Trainer(comm), warm_up + sparse, []
    for step in range(last + 1):
        stage = "warm-up" if step < warm_up else "sparse"
        x = trainer.own_rows(seed=2 + step)
        loss = trainer.warm_up_loss(x) if stage == "warm-up" else trainer.sparse_loss(x)
        if step % every == 0 or step == last:
            points.append(Point(step, stage, loss.item(), trainer.recall()))
            if comm.rank == 0:
                print("step {:4}  {:7}  loss {:.8f}  recall {:.3f}".format(*points[-1]), flush=True)
        if step < last:
            trainer.update(loss, rate=1e-2 if stage == "warm-up" else 5e-3)
    return points


def draw(points: list[Point], path: Path) -> None:
    """Plot recall and loss by step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    for stage in ("warm-up", "sparse"):
        some = [point for point in points if point.stage == stage]
        above.plot([p.step for p in some], [p.recall for p in some], marker=".", label=stage)
        below.plot([p.step for p in some], [p.loss for p in some], marker=".", label=stage)
    above.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    above.set_ylabel(f"recall of the {TOPK} largest keys")
    above.set_ylim(0, 1)
    above.legend(loc="lower right")
    below.set_ylabel("KL per row")
    below.set_yscale("log")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the indexer of sparse attention.")
    parser.add_argument("--ranks", type=int, default=1, help="number of virtual ranks, without torchrun (default 1)")
    parser.add_argument("--warm-up", type=int, default=40, help="steps over all keys (default 40)")
    parser.add_argument("--sparse", type=int, default=40, help="steps over selected keys (default 40)")
    parser.add_argument("--every", type=int, default=10, help="steps per line (default 10)")
    parser.add_argument(
        "--plot", type=Path, default=Path("train_indexer.png"), help="file of the plot (default train_indexer.png)"
    )
    arguments = parser.parse_args()

    if os.environ.get("RANK", "0") == "0":
        print(f"chance: recall {CHANCE:.3f}")
    settings = (arguments.warm_up, arguments.sparse, arguments.every)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        comm = am.comm_from()
        points, prints = train(comm, *settings), comm.rank == 0
        dist.destroy_process_group()
    else:
        points, prints = am.run_virtual(arguments.ranks, lambda comm: train(comm, *settings))[0], True
    if prints:
        draw(points, arguments.plot)
        print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
