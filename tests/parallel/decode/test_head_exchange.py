"""KV data parallelism: who gets which heads of which sequences, and how many bytes it takes."""

import pytest
import torch

from attnmesh import DecodeSharding, run_virtual
from attnmesh.parallel.decode.exchange import HeadExchange


def trade(comm, batch, heads_each, exchange):
    rows = tuple(len(DecodeSharding(kvdp=comm.world).sequences(d, batch)) for d in range(comm.world))
    return HeadExchange(comm, rows, heads_each, exchange)


def message_of(q, parts):
    """Queries [B, q, S, D] as they are sent: heads first, in so many parts."""
    batch = len(q)
    runs = [q[batch * d // parts : batch * (d + 1) // parts] for d in range(parts)]
    return torch.cat([run.transpose(0, 1).flatten() for run in runs])


@pytest.mark.parametrize(
    ("exchange", "batch", "heads", "tokens"),
    [
        ("all_to_all", 8, (1, 1, 1, 1), 1),
        ("all_gather", 8, (2, 2, 2, 2), 3),
        ("all_to_all", 5, (3, 2, 1, 2), 2),
        ("all_to_all", 2, (1, 1, 1, 1), 8),
        ("all_gather", 7, (2, 2), 1),
        ("all_gather", 3, (4,), 2),
    ],
)
def test_heads_of_all_sequences_become_all_heads_of_some_and_back(exchange, batch, heads, tokens):
    dim, world = 4, len(heads)
    q = torch.randn(batch, sum(heads), tokens, dim)
    first = [sum(heads[:d]) for d in range(world)]
    sharding = DecodeSharding(kvdp=world)

    def rank(comm):
        kvdp = trade(comm, batch, heads, exchange)
        mine = q[:, first[comm.rank] : first[comm.rank] + heads[comm.rank]]
        arrived = kvdp.gather_heads(message_of(mine, kvdp.parts), tokens, dim)
        rows = sharding.sequences(comm.rank, batch)
        assert torch.equal(arrived.transpose(0, 1), q[rows.start : rows.stop])
        back = kvdp.scatter_heads(arrived.transpose(0, 1).contiguous())
        assert torch.equal(back, mine.transpose(1, 2))
        return dict(comm.traffic.by_op)

    element = 4 * tokens * dim
    for me, sent in enumerate(run_virtual(world, rank)):
        rows = [len(sharding.sequences(d, batch)) for d in range(world)]
        others = [d for d in range(world) if d != me]
        if exchange == "all_to_all":
            expected = element * sum(heads[me] * rows[d] + rows[me] * heads[d] for d in others)
        else:
            expected = element * len(others) * (heads[me] * batch + rows[me] * sum(heads))
        assert sent == ({exchange: (2, expected)} if world > 1 else {})


class Spoken:
    """A comm that writes down the shapes of what is said."""

    def __init__(self, comm):
        self._comm, self.heard = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_gather(self, x, shapes, into=None):
        arrived = self._comm.all_gather(x, shapes, into)
        self.heard.append((tuple(x.shape), tuple(into.shape)))
        return arrived

    def all_to_all(self, parts, shapes, into=None):
        arrived = self._comm.all_to_all(parts, shapes, into)
        self.heard.append(([tuple(part.shape) for part in parts], tuple(into.shape)))
        return arrived


def as_documented(queries, me):
    """The document's own steps for one of four ranks, in its layouts: q_heads = 1, B = 8, S_tkg = 1, d_head = 64."""
    in_sbuf = [q[:, 0, 0].T for q in queries]  # (d_head, B * q_heads * S_tkg)
    assert in_sbuf[me].shape == (64, 8)
    gathered = torch.cat(in_sbuf)
    assert gathered.shape == (256, 8)
    sliced = gathered.view(4, 64, 8, 1)[:, :, 2 * me : 2 * me + 2]
    assert sliced.shape == (4, 64, 2, 1)
    q = sliced.permute(1, 2, 0, 3).reshape(64, 8)  # (d_head, B/KVDP * KVDP * q_heads * S_tkg)
    return q.view(64, 2, 4, 1).permute(1, 2, 3, 0)  # [B/KVDP, heads, S, d]


def test_the_documents_example_arrow_by_arrow():
    """KVDP = 4, q_heads = 1, B = 8, S_tkg = 1, d_head = 64."""
    queries = [torch.randn(8, 1, 1, 64) for _ in range(4)]

    def rank(comm, exchange):
        spoken = Spoken(comm)
        kvdp = HeadExchange(spoken, (2, 2, 2, 2), (1, 1, 1, 1), exchange)
        q = queries[comm.rank]
        message = q.transpose(0, 1)
        assert message.data_ptr() == q.data_ptr()
        assert message.is_contiguous()  # one head: there is nothing to transpose
        sliced = kvdp.gather_heads(message, 1, 64)
        assert sliced.shape == (4, 2, 1, 64)  # (KVDP * q_heads, B/KVDP, S_tkg, d_head)
        attended = sliced.transpose(0, 1)  # (B/KVDP, KVDP * q_heads, S_tkg, d_head)
        assert torch.equal(attended, as_documented(queries, comm.rank))
        out = kvdp.scatter_heads(attended.contiguous())
        assert out.shape == (8, 1, 1, 64)  # (B, S_tkg, q_heads, d_head)
        assert torch.equal(out, q)
        return spoken.heard

    for heard in run_virtual(4, lambda comm: rank(comm, "all_gather")):
        assert heard == [((1, 8, 1, 64), (4, 8, 1, 64)), ((2, 4, 1, 64), (8, 4, 1, 64))]
    for heard in run_virtual(4, lambda comm: rank(comm, "all_to_all")):
        assert heard == [([(1, 2, 1, 64)] * 4, (4, 2, 1, 64)), ([(2, 1, 1, 64)] * 4, (8, 1, 1, 64))]
