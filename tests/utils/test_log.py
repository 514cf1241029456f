"""The log: what it says, once per signature, and nothing unless it is asked for."""

import io
import logging
from types import SimpleNamespace

import pytest
import torch

import attnmesh as am
from attnmesh.kv_cache.block_manager import BlockPool
from attnmesh.ops import launch
from attnmesh.plan.decode import DecodeShape
from attnmesh.utils import log
from helpers.cli import run

ROOT = logging.getLogger("attnmesh")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No signature has been logged before, and handlers and level are restored."""
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setenv(log.VERBOSE, "1")  # so that it is restored: `delenv` of what is not set remembers nothing
    monkeypatch.delenv(log.VERBOSE)
    handlers, level = ROOT.handlers[:], ROOT.level
    yield
    ROOT.handlers[:], ROOT.level = handlers, level
    ROOT.manager._clear_cache()


@pytest.fixture
def said(caplog):
    """What is logged from INFO on, as (logger, level, text)."""
    caplog.set_level(logging.INFO, logger="attnmesh")
    return lambda: [(record.name, record.levelname, record.getMessage()) for record in caplog.records]


def qkv(length: int = 16, heads: int = 2) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, 16, requires_grad=True) for _ in range(3)]


def test_the_package_has_no_handler_and_no_level_of_its_own():
    assert [type(handler) for handler in ROOT.handlers] == [logging.NullHandler]
    assert ROOT.level == logging.NOTSET
    assert ROOT.propagate


def test_the_backend_of_attention_is_logged_once_per_signature(said):
    for length in (16, 16, 32):
        am.attention(*qkv(length)).sum().backward()
    assert [(name, level) for name, level, _ in said()] == [("attnmesh.ops.dense.dispatch", "INFO")] * 4
    forward, backward, longer, _ = (text for _, _, text in said())
    assert forward.startswith("attention, forward of q (1, 2, 16, 16), k (1, 2, 16, 16), torch.float32 on cpu: aten: ")
    assert "torch's flash kernel is the fastest on the CPU" in forward
    assert "gluon cannot: " in forward
    assert backward.startswith("attention, backward of q (1, 2, 16, 16)")
    assert longer.startswith("attention, forward of q (1, 2, 32, 16)")
    am.attention(*qkv(48), backend="torch")
    assert len(said()) == 4  # it was not chosen


def test_nothing_is_put_into_words_while_nobody_listens(monkeypatch):
    monkeypatch.setattr(log, "log_choice", lambda *_: pytest.fail("it was logged"))
    monkeypatch.setattr("attnmesh.ops.dense.dispatch.log_choice", lambda *_: pytest.fail("it was logged"))
    am.attention(*qkv())


def test_the_schedule_of_context_parallel_is_logged_with_the_estimates(said):
    def rank(comm):
        cp = am.ContextParallel(comm, schedule="auto")
        for _ in range(2):
            cp.attention(*(cp.shard(x, 2) for x in torch.randn(3, 1, 2, 32, 16)))

    am.run_virtual(2, rank)
    found = [text for name, level, text in said() if (name, level) == ("attnmesh.parallel.context", "INFO")]
    assert len(found) == 1
    assert found[0].startswith("Causal() under Zigzag(), 32 tokens over 2 ranks: ")
    assert ", the fastest by estimate (ring " in found[0]
    assert "; ring+ring cannot: " in found[0]


def test_calls_of_too_many_signatures_are_a_warning(said, monkeypatch):
    monkeypatch.setattr("attnmesh.parallel.context._MAX_CACHED_CALLS", 2)

    def rank(comm):
        cp = am.ContextParallel(comm, schedule="ring")
        for length in (8, 12, 16):
            cp.attention(*torch.randn(3, 1, 2, length, 16))

    am.run_virtual(1, rank)
    text = "calls of more than 2 signatures: all are planned anew"
    assert ("attnmesh.parallel.context", "WARNING", text) in said()


def test_the_backends_of_decode_and_sparse_attention_are_logged_once(said):
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 8, 16)
    sparse = torch.randn(6, 4, 96), torch.randn(8, 96), torch.zeros(6, 4, dtype=torch.int32)
    for _ in range(2):
        am.decode_attention(q, k, k)
        am.sparse_attention(*sparse, scale=0.1, d_v=64)
    names = {name: text for name, _, text in said()}
    assert len(said()) == 2
    assert names["attnmesh.ops.decode.api"].startswith("decode of q (1, 4, 1, 16), 2 KV heads, contiguous, torch.float")
    assert names["attnmesh.ops.sparse.dispatch"].endswith("torch; kernels cannot: q is not on a GPU")


def test_the_combine_of_cp_ranks_is_logged(said):
    shape = DecodeShape(batch=4, tokens=1, q_heads=8, kv_heads=2, head_dim=64, hidden=64)
    for _ in range(2):
        am.decode.Exchange().combine(am.DecodeSharding(1, 1, 4), shape, "cpu")
    assert len(said()) == 1
    assert "the fastest by estimate" in said()[0][2]


def test_a_timeout_is_a_warning(said):
    with pytest.raises(am.comm.CommError):
        am.run_virtual(2, lambda comm: __import__("time").sleep(1), timeout=0.05)
    assert said() == [("attnmesh.comm.virtual", "WARNING", "virtual ranks did not finish within 0.05 s")]


def test_evictions_of_blocks_are_for_debugging(caplog):
    caplog.set_level(logging.DEBUG, logger="attnmesh")
    pool = BlockPool(1)
    pool.allocate(1)
    pool.add_hash(0, b"x")
    pool.free([0])
    pool.allocate(1)
    assert [record.getMessage() for record in caplog.records] == ["evicted the cached block 0"]


def test_compile_times_of_our_kernels_are_logged(said, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    launch.log_compile_times()
    ours = SimpleNamespace(fn=SimpleNamespace(__module__="attnmesh.ops.triton_merge"))
    other = SimpleNamespace(fn=SimpleNamespace(__module__="elsewhere"))
    for source, hit in ((ours, False), (other, False), (ours, True)):
        facts = {"metadata": {"name": "merge"}, "metadata_group": {}, "times": SimpleNamespace(total=1_500_000)}
        knobs.compilation.listener(src=source, cache_hit=hit, **facts)
    assert [text for _, _, text in said()] == ["compiled merge in 1.50 s", "read merge in 1.50 s"]
    theirs = knobs.compilation.listener = print
    launch.log_compile_times()
    assert knobs.compilation.listener is theirs


def test_the_command_shows_the_log_with_verbose(monkeypatch):
    command = ("simulate", "--ranks", 2, "--length", "1k", "--schedule", "auto")
    assert "fastest by estimate" not in run(*command).stderr
    for arguments in (("--verbose", *command), (*command, "--verbose")):
        ROOT.handlers[:] = [handler for handler in ROOT.handlers if isinstance(handler, logging.NullHandler)]
        ran = run(*arguments)
        assert ran.exit_code == 0
        assert "INFO attnmesh.cli.simulate: " in ran.stderr
        assert ran.stderr.count("fastest by estimate") == 1
        assert log.os.environ[log.VERBOSE] == "1"


def test_ranks_show_the_log_of_a_verbose_command_one_line_each(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    log.show_if_asked(3)
    ROOT.warning("nobody asked")
    monkeypatch.setenv(log.VERBOSE, "1")
    log.show_if_asked(3)
    log.show_if_asked(3)
    logging.getLogger("attnmesh.comm").warning("two\nlines \x1b[31m")
    assert shown.getvalue() == "rank 3: WARNING attnmesh.comm: two lines \\x1b[31m\n"
