"""An indexer learns from its loss where sparse attention should look, alone or with the sequence spread over ranks.

    python examples/train_indexer.py
    python examples/train_indexer.py --ranks 2                       # two virtual ranks in this process
    torchrun --nproc-per-node 2 examples/train_indexer.py            # real ones

All of them print the same losses but for rounding. The attention layer is frozen, and the indexer, a few small
projections of the layer's input, is to name the 16 keys of every row that attention looks at most. As in DeepSeek-V3.2
it learns in two stages: first from attention over all keys, then from attention over those that it chose itself. Every
step has a new sequence; recall is measured on one that it never learns from. Runs on the CPU, in under a minute. Needs
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
CHANCE = sum(TOPK / (position + 1) for position in range(TOPK, LENGTH)) / (LENGTH - TOPK)  # of keys drawn blindly


class Attention:
    """The layer, which does not learn. Tokens look for tokens like themselves, each head in its own way."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)  # the same layer on every rank
        self.topics = torch.randn(TOPICS, HIDDEN, generator=dice) / TOPICS**0.5
        self.to_kv = torch.randn(HIDDEN, WIDTH, generator=dice) / HIDDEN**0.5
        own = torch.randn(HEADS, WIDTH, WIDTH, generator=dice) / WIDTH**0.5
        self.to_q = torch.eye(WIDTH) + 0.3 * own

    def sequence(self, seed: int) -> Tensor:
        """A layer's input [LENGTH, HIDDEN], the same on every rank: every token is a mixture of a few topics."""
        dice = torch.Generator().manual_seed(seed)
        x = torch.randn(LENGTH, TOPICS, generator=dice) @ self.topics
        return x + 0.1 * torch.randn(LENGTH, HIDDEN, generator=dice)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q [rows, HEADS, WIDTH] and kv [rows, WIDTH], a latent that is key and value of all heads."""
        kv = x @ self.to_kv
        return torch.einsum("id,hde->ihe", kv, self.to_q), kv


class Indexer(nn.Module):
    """What `indexer_topk` and the loss take: queries, keys, and a weight for each row and head."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, INDEX_HEADS * INDEX_WIDTH, bias=False)
        self.to_k = nn.Linear(HIDDEN, INDEX_WIDTH, bias=False)
        self.to_w = nn.Linear(HIDDEN, INDEX_HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach()  # it learns from its own loss, and nobody else does
        w = self.to_w(x) * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
        return self.to_q(x).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH)), self.to_k(x), w


class Point(NamedTuple):
    """How far it is after so many steps."""

    step: int
    stage: str
    loss: float
    recall: float


class Trainer:
    """One rank's part: its rows of every sequence. On one rank, that is all of them."""

    def __init__(self, comm: am.Comm) -> None:
        self.comm, self.layout = comm, am.Zigzag()  # late rows see more keys: every rank has early and late ones
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
        """Over all keys: the indexer comes to know where attention would look if it could look everywhere."""
        q, kv = self.attention(x)
        _, lse = self.ranks.sparse_attention(q, kv, self.every_key, scale=ATTN_SCALE, mask=CAUSAL)
        return self.ranks.indexer_kl_loss(
            *self.indexer(x),
            q=q,
            k=kv,
            lse=lse,
            attn_scale=ATTN_SCALE,
            mask=CAUSAL,
            mode="dense",
            reduction="mean_rows",
        )

    def sparse_loss(self, x: Tensor) -> Tensor:
        """Over the keys that it chose: attention reads no others any more."""
        q, kv = self.attention(x)
        iq, ik, w = self.indexer(x)
        chosen = self.ranks.indexer_topk(iq, ik, w, TOPK, mask=CAUSAL).indices
        _, _, target = self.ranks.sparse_attention(
            q, kv, chosen, scale=ATTN_SCALE, mask=CAUSAL, return_attn_sum=True
        )  # what comes out first goes on through the model; here there is none
        return self.ranks.indexer_kl_loss(iq, ik, w, chosen, target, mask=CAUSAL, reduction="mean_rows")

    def learn(self, loss: Tensor, rate: float) -> None:
        """A step down a loss that is the whole sequence's on every rank; a rank has the gradients of its own rows."""
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.indexer.parameters():
            parameter.grad = self.comm.all_reduce(parameter.grad)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def recall(self) -> float:
        """Of the keys that have most of attention's mass, how many are chosen; of rows that have a choice."""
        x = self.own_rows(seed=1)
        q, kv = self.attention(x)
        _, _, mass = self.ranks.sparse_attention(
            q, kv, self.every_key, scale=ATTN_SCALE, mask=CAUSAL, return_attn_sum=True
        )
        chosen = self.ranks.indexer_topk(*self.indexer(x), TOPK, mask=CAUSAL).indices
        found = (mass.topk(TOPK).indices[:, :, None] == chosen[:, None]).any(2).float().mean(1)
        choice = self.layout.positions(LENGTH, self.comm.world, self.comm.rank) >= TOPK
        return self.comm.all_reduce(found[choice].sum()).item() / (LENGTH - TOPK)


def train(comm: am.Comm, warm_up: int, sparse: int, every: int) -> list[Point]:
    """The loss and the recall on the way, the same on every rank."""
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
            trainer.learn(loss, rate=1e-2 if stage == "warm-up" else 5e-3)
    return points


def draw(points: list[Point], path: Path) -> None:
    """Recall above, loss below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    for stage in ("warm-up", "sparse"):
        some = [point for point in points if point.stage == stage]
        above.plot([p.step for p in some], [p.recall for p in some], marker=".", label=stage)
        below.plot([p.step for p in some], [p.loss for p in some], marker=".", label=stage)
    above.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    above.set_ylabel(f"recall of attention's {TOPK} keys")
    above.set_ylim(0, 1)
    above.legend(loc="lower right")
    below.set_ylabel("KL a row")
    below.set_yscale("log")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="An indexer learns where sparse attention should look.")
    parser.add_argument("--ranks", type=int, default=1, help="virtual ones; under torchrun, its own (default 1)")
    parser.add_argument("--warm-up", type=int, default=40, help="steps over all keys (default 40)")
    parser.add_argument("--sparse", type=int, default=40, help="steps over chosen keys (default 40)")
    parser.add_argument("--every", type=int, default=10, help="steps from one line to the next (default 10)")
    parser.add_argument("--plot", type=Path, default=Path("train_indexer.png"), help="default train_indexer.png")
    arguments = parser.parse_args()

    if os.environ.get("RANK", "0") == "0":
        print(f"chance: recall {CHANCE:.3f}")
    settings = (arguments.warm_up, arguments.sparse, arguments.every)
    if "RANK" in os.environ:  # torchrun started us
        dist.init_process_group("gloo")
        comm = am.comm_from()
        points, speaks = train(comm, *settings), comm.rank == 0
        dist.destroy_process_group()
    else:
        points, speaks = am.run_virtual(arguments.ranks, lambda comm: train(comm, *settings))[0], True
    if speaks:
        draw(points, arguments.plot)
        print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    main()
