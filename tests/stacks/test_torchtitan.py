"""torchtitan with attnmesh's attention: its masks as ours, what is refused, and its Trainer over ranks."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan")

from torch.nn.attention.flex_attention import create_block_mask, or_masks

from attnmesh import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    PerSequence,
    SlidingWindow,
    Zigzag,
    run_virtual,
)  # fmt: skip
from helpers.processes import run_processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torchtitan.py"
LENGTHS = [[5, 7, 1, 11], [24], [1, 22, 1]]  # odd, and of a single token
LENGTH = 24

STEPS = 3
LOSS, CLOSE = 1e-6, 1e-5  # observed: 1e-7 of the loss, 8e-7 of a tensor's largest gradient, 3e-6 in parameters


def ours():
    """attnmesh.training.torchtitan, and the part of torchtitan that makes masks."""
    import torchtitan.models.common.attention as theirs

    import attnmesh.training.torchtitan as module

    return module, theirs


@pytest.fixture(autouse=True)
def restored():
    yield
    if "attnmesh.training.torchtitan" in sys.modules:
        ours()[0].disable()


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


# Masks.


def pairs(function, row, length=LENGTH):
    """The pairs that a mask function allows in a row of the batch."""
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    return function(torch.tensor(row), torch.tensor(0), q, k).expand(length, length)


def dense_attention(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """In place of flex_attention, whose backward does not run on a CPU: every pair of torchtitan's mask functions."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    allowed = torch.stack([pairs(block_mask.mask_mod, row, q.shape[2]) for row in range(q.shape[0])])
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~allowed[:, None], -torch.inf)
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


def block_mask(function, rows):
    return create_block_mask(function, rows, None, LENGTH, LENGTH, device="cpu")


def visible(mask, row):
    mask = mask if mask.sequences is None else mask.of_sequence(row)
    at = torch.arange(LENGTH)
    return mask.visible(at[:, None], at[None]).expand(LENGTH, LENGTH)


@pytest.mark.parametrize("rows", [LENGTHS[:1], LENGTHS], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", ["packed", "documents", "window", "chunks", "blocks", "nested"])
def test_masks_of_flex_attention_are_ours(kind, rows):
    module, theirs = ours()
    positions = positions_of(rows)
    causal, window = theirs.get_causal_mask_mod(), theirs.get_sliding_window_mask_mod(6)
    packed = theirs.get_efficient_causal_mask_mod_for_packed_document(positions)
    documents = theirs.get_document_mask_mod(positions)
    combined = module.and_masks
    function = {
        "packed": combined(causal, packed),  # Llama 3, Qwen 3
        "documents": documents,
        "window": combined(causal, packed, window),  # GPT-OSS
        "chunks": combined(causal, theirs.get_fixed_block_mask_mod(7), documents),
        "blocks": theirs.get_fixed_block_mask_mod(7),
        "nested": combined(combined(causal, window), documents),
    }[kind]
    mask = module.mask_of_blocks(block_mask(function, len(rows)))
    for row in range(len(rows)):
        assert torch.equal(visible(mask, row), pairs(function, row)), row


def test_a_mask_without_documents_is_small():
    module, theirs = ours()
    whole = theirs.get_efficient_causal_mask_mod_for_packed_document(positions_of([[LENGTH]]))
    assert module.mask_of_blocks(block_mask(module.and_masks(theirs.get_causal_mask_mod(), whole), 1)) == Causal()
    window = module.and_masks(theirs.get_causal_mask_mod(), theirs.get_sliding_window_mask_mod(4))
    assert module.mask_of_blocks(block_mask(window, 1)) == SlidingWindow(3)


def test_varlen_metadata_is_documents():
    module, theirs = ours()
    metadata = theirs.create_varlen_metadata_for_document(positions_of(LENGTHS))
    documents = module.mask_of_metadata(metadata, (3, LENGTH))
    assert documents == PerSequence([Documents(LENGTHS[0]), Full(), Documents(LENGTHS[2])])
    assert module.masks_under(documents, module.window_mask((-1, 0))) == Causal() & documents
    assert module.window_mask((5, 0)) == SlidingWindow(5)
    assert module.window_mask((-1, -1)) == Full()


@pytest.mark.parametrize("kind", ["score", "or", "packed alone", "cross", "rows", "keys", "window"])
def test_other_masks_are_refused_by_name(kind):
    module, theirs = ours()
    positions = positions_of(LENGTHS)
    packed = theirs.get_efficient_causal_mask_mod_for_packed_document(positions)
    metadata = theirs.create_varlen_metadata_for_document(positions)

    def odd_keys(b, h, q, k):
        return k % 2 == 1

    refused, message = {
        "score": (lambda: module.mask_of_blocks(block_mask(odd_keys, 1)), "torchtitan's mask functions.*odd_keys"),
        "or": (
            lambda: module.mask_of_blocks(block_mask(or_masks(theirs.get_causal_mask_mod(), packed), 3)),
            "got or_masks",
        ),
        "packed alone": (lambda: module.mask_of_blocks(block_mask(packed, 3)), "with a causal mask"),
        "cross": (
            lambda: module.mask_of_blocks(create_block_mask(odd_keys, 1, None, 8, 16, device="cpu")),
            "as many queries as keys, got 8 and 16",
        ),
        "rows": (
            lambda: module.mask_of_metadata(
                theirs.create_varlen_metadata_for_document(positions + (torch.arange(3)[:, None] == 1)), (3, LENGTH)
            ),
            "first token of every row",
        ),
        "keys": (
            lambda: module.mask_of_metadata(metadata._replace(cu_seq_k=metadata.cu_seq_k + 1), (3, LENGTH)),
            "cu_seq_k must be equal",
        ),
        "window": (lambda: module.window_mask((-1, 3)), r"window_size must be .* got \(-1, 3\)"),
    }[kind]
    with pytest.raises(ValueError, match=message):
        refused()


# Attention of a layer.


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_attention_with_sinks_and_windows_equals_torchtitan(kind, monkeypatch):
    """As a layer of GPT-OSS: kv heads, a window, and sinks that rescale by the lse. Gradients of all of them."""
    module, theirs = ours()
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    torch.manual_seed(0)
    tensors = [torch.randn(3, LENGTH, heads, 8) for heads in (4, 2, 2)] + [torch.randn(4), torch.randn(3, LENGTH, 4, 8)]
    function = module.and_masks(
        theirs.get_causal_mask_mod(), theirs.get_efficient_causal_mask_mod_for_packed_document(positions_of(LENGTHS)),
        theirs.get_sliding_window_mask_mod(6),
    )  # fmt: skip
    masks = block_mask(function, 3)
    if kind == "flex":
        layer, read = module.FlexAttentionOverRanks.Config().build(), module.mask_of_blocks(masks)
    else:
        layer = module.VarlenAttentionOverRanks.Config(window_size=(5, 0)).build()
        read = module.mask_of_metadata(
            theirs.create_varlen_metadata_for_document(positions_of(LENGTHS)), (3, LENGTH)
        )  # fmt: skip

    def gradients(attention, masks, tensors):
        q, k, v, sinks, grad = [x.clone().requires_grad_() for x in tensors]
        out = attention(
            q, k, v, attention_masks=masks, scale=0.3, enable_gqa=True,
            out_transform=lambda out, lse: apply_attention_sink_rescale(out, lse, sinks),
        )  # fmt: skip
        out.backward(grad.detach())
        return [out.detach(), q.grad, k.grad, v.grad, sinks.grad]

    def rank(comm):
        cp = ContextParallel(comm)
        shards = [x if x.dim() == 1 else cp.shard(x, 1) for x in tensors]
        *found, sinks = gradients(layer, module.RankBatch(cp, LENGTH, read), shards)
        return [cp.unshard(x, 1, LENGTH) for x in found] + [sinks]

    monkeypatch.setattr(theirs.FlexAttention, "_compiled_flex_attn", staticmethod(dense_attention))
    expected = gradients(theirs.FlexAttention.Config().build(), masks, tensors)
    ranks = run_virtual(2, rank)
    found = [*ranks[0][:-1], ranks[0][-1] + ranks[1][-1]]
    for name, x, y in zip(("out", "q", "k", "v", "sinks"), found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=CLOSE, rtol=CLOSE, msg=name)


# The override.


def test_the_override_replaces_all_layers_and_keeps_the_sequence_sharded():
    module, _ = ours()
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models import llama3
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3._debugmodel("flex")
    set_llama3_sharding_config(config, enable_sp=True)
    imports = [("attnmesh.training.torchtitan.flex_attention", {"schedule": "allgather"})]
    assert len(apply_overrides(OverrideConfig(imports=imports), config)) == len(config.layers)
    assert module._options == {"schedule": "allgather", "backend": "auto"}
    for layer in config.layers:
        inner = layer.attention.inner_attention
        assert type(inner) is module.FlexAttentionOverRanks.Config
        assert inner.sharding_config.in_dst_shardings == inner.sharding_config.in_src_shardings  # k, v stay sharded
        assert list(inner.sharding_config.local_map.in_grad_placements) == list(
            inner.sharding_config.in_src_shardings.values()
        )
    with pytest.raises(ValueError, match="backend must be"):
        apply_overrides(OverrideConfig(imports=[(imports[0][0], {"backend": "flex"})]), llama3._debugmodel("flex"))


@pytest.mark.parametrize("balancer", ["headtail", "ptrr", None])
def test_a_batch_is_sharded_by_the_layout_that_the_config_names(balancer):
    module, theirs = ours()
    positions, tokens = positions_of(LENGTHS), torch.arange(3 * LENGTH).view(3, LENGTH)
    documents = PerSequence([Documents(LENGTHS[0]), Full(), Documents(LENGTHS[2])])
    layout = {"headtail": Zigzag(), "ptrr": Balanced(Causal() & documents), None: Contiguous()}[balancer]

    def rank(comm):
        metadata = theirs.create_varlen_metadata_for_document(positions)
        mesh = SimpleNamespace(_attnmesh_context=ContextParallel(comm))
        given = {"positions": positions, "attention_masks": metadata}
        inputs, labels, more = module._shard_batch(None, tokens, tokens + 1, given, mesh, None, balancer)
        batch = more["attention_masks"]
        assert (batch.cp.layout, batch.length, batch.mask) == (layout, LENGTH, documents)
        at = layout.positions(LENGTH, comm.world, comm.rank)
        assert torch.equal(inputs, tokens[:, at])
        assert torch.equal(labels, tokens[:, at] + 1)
        assert torch.equal(more["positions"], positions[:, at])
        assert given["attention_masks"] is metadata  # the caller's dict stays as it is
        return len(at)

    assert run_virtual(3, rank) == [LENGTH // 3] * 3


# What is refused.


def test_another_version_is_refused(monkeypatch):
    module, _ = ours()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.2.9")
    with pytest.raises(ValueError, match=r"torchtitan must be 0\.3, got 0\.2\.9"):
        module.enable()


def test_enable_replaces_and_disable_restores():
    module, _ = ours()
    import torchtitan.distributed.context_parallel as package
    import torchtitan.models.llama3.parallelize as llama

    before = package.prepare_context_parallel_input, llama.apply_cp_to_forward
    module.enable(schedule="allgather")
    assert package.prepare_context_parallel_input is not before[0]
    assert llama.apply_cp_to_forward is not before[1]
    module.disable()
    assert (package.prepare_context_parallel_input, llama.apply_cp_to_forward) == before
    with pytest.raises(ValueError, match="schedule must be"):
        module.enable(schedule="rings")


@pytest.mark.parametrize("kind", ["images", "labels", "no mask", "a linear layer", "load balancer", "mask key"])
def test_batches_that_are_not_served_are_refused(kind):
    module, theirs = ours()
    positions = positions_of(LENGTHS)
    metadata = theirs.create_varlen_metadata_for_document(positions)
    causal = block_mask(theirs.get_causal_mask_mod(), 3)
    given = {"attention_masks": metadata, "labels": positions, "load_balancer_type": "headtail"}
    more, message = {
        "images": ({"pixel_values": positions}, "got pixel_values"),
        "labels": ({"labels": positions[:, 1:]}, r"got \[3, 24\] and \[3, 23\]"),
        "no mask": ({"attention_masks": None}, "got NoneType"),
        "a linear layer": ({"attention_masks": {"linear": metadata}}, "got VarlenMetadata"),
        "load balancer": ({"load_balancer_type": "zigzag"}, "must be one of .*got \"?'?zigzag"),
        "mask key": ({"load_balancer_type": "ptrr", "attention_masks": {"basic": causal}}, "ptrr_mask_key must be"),
    }[kind]
    given |= more
    balancer, labels = given.pop("load_balancer_type"), given.pop("labels")

    def rank(comm):
        mesh = SimpleNamespace(_attnmesh_context=ContextParallel(comm))
        with pytest.raises(ValueError, match=message):
            module._shard_batch(None, positions, labels, {"positions": positions, **given}, mesh, None, balancer)
        return True

    assert all(run_virtual(2, rank))


def test_layers_refuse_what_they_do_not_compute():
    module, theirs = ours()
    layer = module.FlexAttentionOverRanks.Config().build()
    q = torch.randn(1, LENGTH, 2, 8)
    masks = block_mask(theirs.get_causal_mask_mod(), 1)
    with pytest.raises(ValueError, match="score_mod must be None"):
        layer(q, q, q, attention_masks=masks, score_mod=lambda score, b, h, q, k: score)
    layer.ranks = 4
    with pytest.raises(ValueError, match=r"prepare_context_parallel_input.*context_parallel_degree=4.*got BlockMask"):
        layer(q, q, q, attention_masks=masks)
    with pytest.raises(ValueError, match=r'compile\.components must not have "model"'):
        module._refuse_compile(None, torch.nn.Sequential(layer), compile_config=None, parallel_dims=None)
    with pytest.raises(ValueError, match="all layers, got Identity"):
        module._keep_forward(None, [layer, torch.nn.Identity()], None)


# torchtitan's Trainer over ranks.


def example():
    """The example, which has torchtitan run on CPU ranks."""
    if "train_torchtitan" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_torchtitan", EXAMPLE)
        sys.modules["train_torchtitan"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_torchtitan"]


def bare(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def steps(run, weights):
    """Losses of the steps, gradients of the first one and the last parameters, as the Trainer computes them."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    titan = example()
    trainer = run.build()
    if trainer.parallel_dims.pp_enabled:
        titan.with_microbatches(trainer.pp_schedule)
    parameters = {bare(name): p for part in trainer.model_parts for name, p in part.named_parameters()}
    with torch.no_grad():
        for name, p in parameters.items() if weights else ():
            full = weights[name]
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements) if isinstance(p, DTensor) else full)
    first = {name: whole(p.detach()) for name, p in parameters.items()}
    losses, gradients = [], {}
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(loss)
    step = trainer.optimizers.step

    def keep_gradients():
        if not gradients:
            gradients.update({name: whole(p.grad) for name, p in parameters.items()})
        step()

    trainer.optimizers.step = keep_gradients
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(batches)
    trainer.close()
    return first, losses, gradients, {name: whole(p.detach()) for name, p in parameters.items()}


def environment(comm):
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it starts torch.distributed itself
    os.environ.update(RANK=str(comm.rank), LOCAL_RANK=str(comm.rank), WORLD_SIZE=str(comm.world))


def reference(comm):
    """torchtitan's own FlexAttention on one rank, with `dense_attention` as its kernel."""
    environment(comm)
    titan = example()
    from torchtitan.models.common import attention, decoder

    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    decoder.create_attention_mask = create_block_mask
    with tempfile.TemporaryDirectory() as folder:
        run = titan.config(1, 1, 1, "headtail", 1, folder)
        run.override.imports = []
        run.activation_checkpoint = None
        return steps(run, None)


RUNS = {
    "cp=4": {"cp": 4},
    "cp=2, dp_shard=2, balanced": {"cp": 2, "balancer": "ptrr", "checkpointing": "full"},
    "cp=2, tp=2": {"cp": 2, "tp": 2},
    "cp=2, pp=2": {"cp": 2, "pp": 2},
    "cp=4, varlen": {"cp": 4, "attention": "varlen"},
    "cp=4, contiguous, full_dtensor": {"cp": 4, "balancer": None, "backend": "full_dtensor"},
    "cp=4, spmd_types": {"cp": 4, "backend": "spmd_types"},
}


def over_ranks(comm, weights):
    environment(comm)
    titan = example()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.llama3 import model, parallelize

    # Llama 3 refuses what GPT-OSS and DeepSeek V3 let pass: VarlenAttention with context parallelism.
    model.VarlenAttention = SimpleNamespace(Config=type(None))
    resolve = parallelize.resolve_fsdp_mesh
    found = {}
    for name, options in RUNS.items():
        cp, tp, pp, backend = (
            options.get(key, default)
            for key, default in (("cp", 1), ("tp", 1), ("pp", 1), ("backend", "partial_dtensor"))
        )
        with tempfile.TemporaryDirectory() as folder:
            run = titan.config(cp, tp, pp, options.get("balancer", "headtail"), comm.world // (cp * tp * pp), folder)
        run.parallelism.spmd_backend = backend
        if options.get("checkpointing") == "full":
            run.activation_checkpoint = FullAC.Config()
        if options.get("attention") == "varlen":
            run.override.imports = ["attnmesh.training.torchtitan.varlen_attention"]
            for layer in run.model_spec.model.layers:
                layer.attention.inner_attention = VarlenAttention.Config()
        # FSDP2 of torch 2.13 does not know the parameters of spmd_types, which are no DTensors: it gets a plain mesh.
        plain = lambda dims: (init_device_mesh("cpu", (comm.world,), mesh_dim_names=("fsdp",)), None)  # noqa: E731
        parallelize.resolve_fsdp_mesh = plain if backend == "spmd_types" else resolve
        found[name] = steps(run, weights)[1:]
    return found


@pytest.mark.timeout(1200)
def test_a_tiny_llama3_over_4_ranks_equals_one():
    """Losses of three steps, gradients and parameters, with documents of odd lengths and selective checkpointing."""
    weights, losses, gradients, parameters = run_processes(1, reference, timeout=300)[0]
    assert len(losses) == STEPS
    assert losses[0] != losses[-1]
    ranks = run_processes(4, over_ranks, weights, timeout=850)
    for name, options in RUNS.items():
        seen = set()
        for rank, results in enumerate(ranks):
            rank_losses, rank_gradients, rank_parameters = results[name]
            if rank_losses[0] > 0:  # the last stage of a pipeline has the loss
                # With full_dtensor, torchtitan logs the sum over cp of losses that are summed already.
                times = options["cp"] if options.get("backend") == "full_dtensor" else 1
                for x, y in zip(rank_losses, losses, strict=True):
                    assert x == pytest.approx(y * times, rel=LOSS), (name, rank)
                seen.add("loss")
            for key, x in rank_gradients.items():
                y = gradients[key]
                assert (x - y).abs().max() <= CLOSE * y.abs().max(), (name, rank, "gradient", key)
                assert (rank_parameters[key] - parameters[key]).abs().max() <= CLOSE, (name, rank, "parameter", key)
                seen.add(key)
        assert seen == {"loss", *parameters}, name  # the stages of a pipeline together


@pytest.mark.timeout(400)
def test_the_example_runs_over_2_ranks():
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
         "--cp", "2", "--load-balancer", "ptrr"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = dict(re.findall(r"^rank (\d) step 3 loss (\d\.\d{9})$", ran.stdout, flags=re.MULTILINE))
    assert set(losses) == {"0", "1"}
    assert losses["0"] == losses["1"]
