"""Models with images over ranks: loss and all gradients are those of one process, or the batch is refused in words."""

import warnings

import pytest
import torch

import attnmesh as am
from attnmesh.core.layouts import Aligned
from attnmesh.generation.generator import Generator
from attnmesh.integrations.multimodal import ShardedEmbeddings, serve_images
from attnmesh.integrations.transformers_attention import layer_mask, register_attention
from helpers.cases import sweep
from helpers.decoder_types import quiet
from helpers.models import attnmesh_model, on_virtual_ranks
from helpers.vision_models import (
    CONFIGS,
    IMAGE,
    batch,
    check,
    lines,
    small_model,
    table,
    written,
)


@pytest.fixture(autouse=True)
def _quiet():
    register_attention()
    with torch.random.fork_rng(), warnings.catch_warnings():
        quiet()
        yield


@pytest.mark.parametrize(
    ("kind", "world", "rows"),
    [
        ("qwen2_5_vl", 2, {"padding": "left"}),  # rotary positions in three dimensions, found in whole rows
        ("qwen3_vl", 3, {}),  # features of images are added in the decoder layers, too
        ("gemma3", 3, {"padding": "left"}),  # images whose tokens attend to one another, also across windows
        ("mistral3", 2, {}),  # a mask of patches in the image encoder
        sweep("gemma3", 2, {"images": False}),
        sweep("qwen2_5_vl", 3, {"images": False}),
        sweep("paligemma", 3, {"padding": "left"}),  # a prefix whose tokens attend to one another
        sweep("qwen2_5_vl", 2, {"video": True}),
        sweep("qwen3_vl", 3, {"video": True}),
        sweep("qwen3_vl", 2, {"padding": "left", "length": 57}),
        *(sweep(kind, world, {}) for kind in CONFIGS if kind != "mllama" for world in (2, 3)),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(kind, world, rows):
    check(kind, world, **rows)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [am.Contiguous(), am.Striped(), am.Zigzag()], ids=str)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_other_layouts(kind, layout):
    check(kind, 3, how={"balance": False}, layout=layout)


@pytest.mark.parametrize("kind", ["gemma3", sweep("qwen2_5_vl"), sweep("llava")])
def test_packed_documents_with_images(kind):
    """Each document of a packed row is computed as it is by itself."""
    model = small_model(kind, "eager")
    given = batch(kind)
    ids, types = given["input_ids"][:1], [name for name in given if name.endswith("token_type_ids")]
    is_image = (ids[0] == IMAGE).tolist()
    cut = 1 + is_image.index(False, is_image.index(True))  # behind the first image
    patches = [1, 1] if "image_grid_thw" not in given else [32, 16]
    pixels = given["pixel_values"].split([*patches, len(given["pixel_values"]) - sum(patches)])[:2]
    grids = given.get("image_grid_thw")
    wanted = []
    for at, (begin, end) in enumerate([(0, cut), (cut, 41)]):
        document = {name: given[name][:1, begin:end] for name in types} | {"pixel_values": pixels[at]}
        document |= {} if grids is None else {"image_grid_thw": grids[at : at + 1]}
        wanted.append(model(input_ids=ids[:, begin:end], **document).logits.detach())
    images = {"pixel_values": torch.cat(pixels)} | ({} if grids is None else {"image_grid_thw": grids[:2]})
    packed = small_model(kind, "attnmesh")

    def rank(comm):
        tokens = {name: given[name][:1] for name in types}
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, document_lengths=[[cut, 41 - cut]], **tokens, **images)
        return inputs["attention_pass"].unshard(packed(**inputs).logits.detach())

    found = on_virtual_ranks(2, rank)[0]
    torch.testing.assert_close(found, torch.cat(wanted, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gemma3", sweep("qwen2_5_vl"), sweep("mistral3"), sweep("paligemma")])
def test_one_device(kind):
    given = batch(kind)
    wanted, found = (small_model(kind, name)(**given) for name in ("eager", "attnmesh"))
    real = given["attention_mask"] == 1
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-4, atol=1e-4)


# The embeddings of a rank's tokens.


def _doubled_where(_, __, found):
    return torch.where(torch.ones(1, dtype=torch.bool), found * 2.0, found)


def _written(_, __, found):
    found[:, 5] = 0.25
    return found


@pytest.mark.parametrize("change", [_doubled_where, _written, lambda _, __, found: found.clamp_(-0.2, 0.2)])
def test_code_that_reads_or_changes_all_embeddings_is_served(change):
    """It has them of all tokens, on every rank."""
    given = batch("llava")
    whole = small_model("llava", "eager")
    whole.get_input_embeddings().register_forward_hook(change)
    wanted = whole(**given)
    wanted.loss.backward()

    def rank(comm):
        model = small_model("llava", "attnmesh")
        serve_images(model)
        model.get_input_embeddings().register_forward_hook(change)
        with torch.autograd.set_multithreading_enabled(False):
            out = model(**am.shard_inputs(am.ContextParallel(comm), **given))
            out.loss.backward()
        return out.loss.detach(), model.get_input_embeddings().weight.grad

    everyone = on_virtual_ranks(2, rank)
    torch.testing.assert_close(sum(loss for loss, _ in everyone), wanted.loss.detach())
    torch.testing.assert_close(sum(grad for _, grad in everyone), whole.get_input_embeddings().weight.grad)


@pytest.mark.parametrize("kind", ["llava", sweep("qwen3_vl"), sweep("gemma3"), sweep("idefics3"), sweep("paligemma")])
def test_only_the_embeddings_of_own_tokens_are_computed(kind, monkeypatch):
    def refuse(_):
        raise AssertionError("all embeddings")

    monkeypatch.setattr(ShardedEmbeddings, "whole", refuse)
    given, model, seen = batch(kind), small_model(kind, "attnmesh"), []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: seen.append(ids[0].shape[1]))

    def rank(comm):
        with torch.no_grad():
            model(**am.shard_inputs(am.ContextParallel(comm), **given))

    on_virtual_ranks(2, rank)
    length = given["input_ids"].shape[1]
    assert sorted(seen) in ([length // 2, length - length // 2], [length // 2 + 1] * 2), seen


# Masks.


def _text_config():
    return small_model("gemma3", "attnmesh").config.text_config


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_masks_with_blocks_are_those_of_the_mask_function(window):
    from transformers import masking_utils as mu

    numbers = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, 2], [-1] * 9, [0, 0, 0, 0, 0, 1, 1, -1, -1]])
    real = torch.tensor([[1] * 9, [1] * 9, [1] * 8 + [0]])
    overlay = mu.blockwise_overlay(numbers)
    functions = [mu.or_masks(mu.causal_mask_function, overlay)]
    if window is not None:
        slides = mu.sliding_window_overlay(window)
        functions = [
            mu.and_masks(functions[0], slides),  # Gemma 3: the window holds in images, too
            mu.or_masks(mu.and_masks(slides, mu.causal_mask_function), overlay),
        ]
    at = torch.arange(9)
    for function in functions:
        found = layer_mask(
            batch_size=3, q_length=9, kv_length=9, mask_function=function, attention_mask=real,
            device=torch.device("cpu"), config=_text_config(),
        )  # fmt: skip
        assert found.window == (None if window is None else window - 1)
        visible = found.kind.visible(at[:, None], at[None])
        for row in range(3):
            wanted = [[bool(function(row, 0, q, k)) for k in at] for q in at]
            assert torch.equal(visible[row], torch.tensor(wanted)), (row, function)


@pytest.mark.parametrize(
    ("numbers", "chunk", "message"),
    [
        ([[0, 0, -1, 0, 0]], None, "got a mask with a block in several parts"),
        ([[-1, 0, 0, -1, -1]], 3, r"must be causal, or have a sliding window, got Chunked\(size=3\)"),
    ],
)
def test_other_masks_with_blocks_are_refused(numbers, chunk, message):
    from transformers import masking_utils as mu

    function = mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(torch.tensor(numbers)))
    if chunk is not None:
        function = mu.and_masks(function, mu.chunked_overlay(chunk, torch.zeros(1, dtype=torch.long)))
    with pytest.raises(ValueError, match=message):
        layer_mask(
            batch_size=1, q_length=5, kv_length=5, mask_function=function, device=torch.device("cpu"),
            config=_text_config(),
        )  # fmt: skip


# What is refused.

LAYOUT = Aligned(am.Zigzag(), 4)


def _other_tokens(inputs):
    inputs["input_ids"] = inputs["input_ids"] + 1


def _own_loss(model):
    """Let a model compute the mean loss of its tokens itself."""
    kind = type(model)

    class OwnLoss(kind):
        def forward(self, labels=None, **kwargs):
            out = super().forward(**kwargs)
            out.loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            return out

    model.__class__ = OwnLoss


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (None, {"pixel_values": "image.png"}, "pixel_values must be a tensor or a list of tensors"),
        (None, {"token_type_ids": torch.zeros(2, 40)}, r"token_type_ids must be a tensor \[2, 41\]"),
        (_other_tokens, {}, "input_ids must be what shard_inputs returned"),
        ("own loss", {}, "labels must be None for a model that computes its loss in its own way"),
        ("other images", {}, "pixel_values"),
        ("reproducible", {}, "must be given a ContextParallel that is not reproducible"),
        ("llama", {}, "LlamaForCausalLM: a batch over ranks must not have images for a model without"),
    ],
)
def test_what_is_not_served_is_refused_on_every_rank(change, how, message):
    given = batch("llava") | how
    model = small_model("llava", "attnmesh") if change != "llama" else attnmesh_model("llama")
    if change == "own loss":
        _own_loss(model)

    def call(ranks, mine):
        inputs = am.shard_inputs(ranks, **mine)
        if callable(change):
            change(inputs)
        model(**inputs)

    def rank(comm):
        mine = dict(given)
        if change == "other images" and comm.rank:
            mine["pixel_values"] = given["pixel_values"] + 1
        with pytest.raises(ValueError, match=message):
            call(am.ContextParallel(comm, layout=LAYOUT, reproducible=change == "reproducible"), mine)

    on_virtual_ranks(2, rank)


def test_a_compiled_model_takes_no_images():
    given, model = batch("llava"), torch.compile(small_model("llava", "attnmesh"), backend="eager", fullgraph=True)

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), **given)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="must not have images for a compiled model"):
            model(**inputs)

    on_virtual_ranks(1, rank)


def test_the_model_is_as_before_after_an_error():
    given = batch("llava")
    model = small_model("llava", "attnmesh")

    def rank(comm):
        few = given | {"pixel_values": given["pixel_values"][:2]}
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            model(**am.shard_inputs(am.ContextParallel(comm), **few))
        return model(**am.shard_inputs(am.ContextParallel(comm), **given)).loss.detach()

    found = sum(on_virtual_ranks(2, rank))
    torch.testing.assert_close(found, small_model("llava", "eager")(**given).loss.detach())


def test_cross_attention_to_images_is_refused():
    with pytest.raises(ValueError, match="attention_mask must be None or"):
        check("mllama", 2)


def test_generators_take_models_of_text_only():
    def rank(comm):
        with pytest.raises(
            ValueError, match=r"must be a language model to generate, got LlavaForConditionalGeneration"
        ):
            Generator(small_model("llava", "attnmesh"), None, comm, cache_tokens=100)

    on_virtual_ranks(2, rank)


def test_batches_have_images_in_several_shards():
    """Otherwise the tests above would test less."""
    ids = batch("gemma3")["input_ids"]
    edges = [round(41 * i / 6) for i in range(1, 6)]
    assert any(ids[row, at] == ids[row, at - 1] == IMAGE for row in range(2) for at in edges)


@pytest.mark.sweep
def test_the_table_in_the_documentation_is_current():
    assert written() == lines(table())
