"""Small random models with images, batches for them, and what attnmesh does with each of these types.

`python -m helpers.vision_models` writes the table in the docs, from the folder of the repository with src and tests in
PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

import torch

import attnmesh as am
from attnmesh.integrations.transformers_attention import register_attention
from helpers.decoder_types import quiet, reason_of, refused_and_served, write_between
from helpers.decoder_types import written as written_between
from helpers.models import on_virtual_ranks

IMAGE, VIDEO, START = 50, 51, 52  # tokens
LENGTH = 41

_BEGIN, _END = "<!-- image types: begin -->", "<!-- image types: end -->"

_TEXT: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
_VIT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_QWEN = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}


def _llava(text: str, vision: str, **own: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": text, **_TEXT}, "vision_config": {"model_type": vision, **_VIT},
        "image_token_index": IMAGE, "image_token_id": IMAGE, **own,
    }  # fmt: skip


_PATCHES = {**_VIT, "num_patches": 16}
_QWEN3 = {
    **_QWEN_IDS,
    "vision_config": _QWEN | {
        "intermediate_size": 24, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    },
}  # fmt: skip
_ADDED_LAYERS = {"num_hidden_layers": 4, "layer_types": _ALTERNATING * 2, "sliding_window": 6}

CONFIGS: dict[str, dict[str, Any]] = {
    "aya_vision": _llava("cohere2", "siglip_vision_model", downsample_factor=2),
    "cohere2_vision": _llava("cohere2", "siglip_vision_model", downsample_factor=2),
    "deepseek_vl": _llava("llama", "siglip_vision_model"),
    "gemma3": {
        "text_config": _TEXT | {"sliding_window": 6, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8},
        "vision_config": {"model_type": "siglip_vision_model", **_VIT, "vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE, "image_token_id": IMAGE,
    },
    "gemma4": {
        "text_config": _TEXT | _ADDED_LAYERS | {
            "num_kv_shared_layers": 1, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 53,
        },
        "vision_config": _VIT | {
            "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16
        },
        "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_config": None,
    },
    "glm4v": {
        "text_config": _TEXT | _ROPE, "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START,
        "image_end_token_id": 49, "video_start_token_id": 48, "video_end_token_id": 47,
        "vision_config": _QWEN | {
            "hidden_size": 32, "image_size": 16, "temporal_patch_size": 2, "out_hidden_size": 32,
            "intermediate_size": 24,
        },
    },
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": IMAGE,
        "vision_config": _VIT | {
            "output_channels": 16, "image_size": 32, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 24
        },
    },
    "idefics2": {
        "text_config": {"model_type": "mistral", **_TEXT}, "vision_config": _VIT, "image_token_id": IMAGE,
        "perceiver_config": {
            "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 8, "num_key_value_heads": 1,
        },
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": _VIT, "scale_factor": 2,
        "image_token_id": IMAGE,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": IMAGE, "downsample_ratio": 0.5,
        "vision_config": _VIT | {"image_size": [16, 16], "patch_size": [4, 4]}, "image_seq_length": 4,
    },
    "lfm2_vl": {
        "text_config": {
            "model_type": "lfm2", **_TEXT, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8
        },
        "vision_config": {"model_type": "siglip2_vision_model", **_PATCHES}, "image_token_id": IMAGE,
        "downsample_factor": 2, "projector_hidden_size": 16,
    },
    "llama4": {
        "text_config": _TEXT | {
            "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "attention_chunk_size": 6,
            "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 24,
            "attn_temperature_tuning": False,
        },
        "vision_config": _VIT | {
            "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
            "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": IMAGE,
    },
    "llava": _llava("llama", "clip_vision_model", image_seq_length=16),
    "llava_onevision": _llava("qwen2", "siglip_vision_model", image_grid_pinpoints=[[16, 16]], video_token_index=VIDEO),
    "llava_next": _llava("llama", "clip_vision_model", image_seq_length=16, image_grid_pinpoints=[[16, 16]]),
    "mistral3": _llava("mistral", "pixtral", spatial_merge_size=2),
    "mllama": {
        "text_config": _TEXT | {"cross_attention_layers": [1]}, "image_token_index": IMAGE,
        "vision_config": _VIT | {
            "num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 1, "vision_output_dim": 32,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
        },
    },
    "paligemma": _llava("gemma", "siglip_vision_model", projection_dim=32),
    "qwen2_vl": {
        "text_config": _TEXT | _ROPE, "vision_config": _QWEN | {"embed_dim": 16, "hidden_size": 32}, **_QWEN_IDS
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | _ROPE, **_QWEN_IDS,
        "vision_config": _QWEN | {
            "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]
        },
    },
    "qwen3_5": {
        "text_config": _TEXT | {
            "rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        },
        **_QWEN3,
    },
    "qwen3_vl": {"text_config": _TEXT | _ROPE, **_QWEN3},
    "qwen3_vl_moe": {
        "text_config": _TEXT | _ROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **_QWEN3,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": _VIT, "scale_factor": 2,
        "image_token_id": IMAGE,
    },
    "video_llama_3": {
        "text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_config": {"model_type": "video_llama_3_vision", **_VIT},
    },
    "vipllava": _llava("llama", "clip_vision_model", image_seq_length=16, vision_feature_layers=[-1, -2]),
}  # fmt: skip
"""What makes each type small."""

_TOKENS = {
    "llava": [16] * 3, "paligemma": [16] * 3, "llava_onevision": [17, 17, 36], "qwen": [8, 4, 8], "vipllava": [16] * 3,
    "llava_next": [36] * 3, "deepseek_vl": [16] * 3,
}  # fmt: skip
"""Of each image; 4 of most."""


def small_model(kind: str, implementation: str) -> Any:
    """A small random model of this type."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    register_attention()
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=implementation).float()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    return model.eval()


def batch(
    kind: str, *, padding: str = "right", length: int = LENGTH, images: bool = True, video: bool = False, seed: int = 3
) -> dict[str, Any]:
    """Two rows of another number of images each, one of them padded, as a processor makes them.

    With `video`, the second image is a video of one frame, for Qwen's models.
    """
    random = torch.Generator().manual_seed(seed)
    length += {"llava_onevision": 4, "llava_next": 45}.get(kind, 0)
    ids = torch.randint(8, 48, (2, length), generator=random)
    real = torch.ones_like(ids)
    real[1, length - 5 :] = 0
    if padding == "left":
        real = real.flip(1)
    sizes = [(4, 8), (4, 4), (8, 4)] if kind.startswith("qwen") else [(4, 4)] * 3
    if images:
        counts = _TOKENS.get(kind.partition("2")[0].partition("3")[0] if kind.startswith("qwen") else kind, [4] * 3)
        begins = [3, counts[0] + 6, 2 if counts[2] > 16 else 11]
        for row, begin, count in zip((0, 0, 1), begins, counts, strict=True):
            ids[row, begin : begin + count] = IMAGE
            ids[row, begin - 1] = START if kind.startswith("qwen") else 9
    ids = ids.masked_fill(real == 0, 0)
    labels = ids.masked_fill((real == 0) | (ids == IMAGE), -100)
    labels[0, ::3] = -100
    if padding == "left":
        labels[1, :6] = -100  # the token before is padding, and what that attends to depends on the kernel
    found = {"input_ids": ids, "labels": labels, "attention_mask": real}
    if kind.startswith("qwen") or kind in ("gemma4", "glm4v"):
        found["mm_token_type_ids"] = (ids == IMAGE).int()
    elif kind in ("gemma3", "paligemma"):
        found["token_type_ids"] = (ids == IMAGE).long() if kind == "gemma3" else _suffix(ids, real)
    found |= _pixels(kind, sizes, random) if images else {}
    return _with_video(found) if video else found


def _with_video(given: dict[str, Any]) -> dict[str, Any]:
    pixels, grid, ids = given["pixel_values"].split([32, 16, 32]), given["image_grid_thw"], given["input_ids"].clone()
    second = (ids[0] == IMAGE).nonzero().flatten()[8:]
    types = given["mm_token_type_ids"].clone()
    ids[0, second], types[0, second] = VIDEO, 2
    return given | {
        "input_ids": ids, "mm_token_type_ids": types, "pixel_values": torch.cat(pixels[::2]),
        "image_grid_thw": grid[::2], "pixel_values_videos": pixels[1], "video_grid_thw": grid[1:2],
    }  # fmt: skip


def _suffix(ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The tokens after the last image of each row, as PaliGemma's processor marks them."""
    after = (ids == IMAGE).long().flip(1).cumsum(1).flip(1) == 0
    return (after & (real == 1)).long()


def _pixels(kind: str, sizes: list[tuple[int, int]], random: torch.Generator) -> dict[str, Any]:
    if kind.startswith("qwen") or kind in ("glm4v", "video_llama_3"):
        patches, width = sum(height * width for height, width in sizes), 48 if kind == "video_llama_3" else 96
        grid = torch.tensor([(1, *size) for size in sizes])
        more = {"image_merge_sizes": torch.tensor([2] * 3)} if kind == "video_llama_3" else {}
        return {"pixel_values": torch.randn(patches, width, generator=random), "image_grid_thw": grid, **more}
    pixels = torch.randn(3, 3, 16, 16, generator=random)
    match kind:
        case "mistral3":
            return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]] * 3)}
        case "got_ocr2":
            return {"pixel_values": torch.randn(3, 3, 32, 32, generator=random)}
        case "lfm2_vl":
            return {
                "pixel_values": torch.randn(3, 16, 48, generator=random), "spatial_shapes": torch.tensor([[4, 4]] * 3),
                "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
            }  # fmt: skip
        case "gemma4":
            places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
            patches = torch.randn(3, 16, 48, generator=random)
            return {"pixel_values": patches, "image_position_ids": places.expand(3, -1, -1)}
        case "mllama":
            return {
                "pixel_values": pixels[:2].view(2, 1, 1, 3, 16, 16), "aspect_ratio_ids": torch.ones(2, 1).long(),
                "aspect_ratio_mask": torch.ones(2, 1, 1).long(),
            }  # fmt: skip
        case "llava_next":
            return {
                "pixel_values": torch.stack([pixels, pixels.flip(0)], 1),
                "image_sizes": torch.tensor([[16, 16]] * 3),
            }
        case "llava_onevision":  # the whole image, and one part of it
            return {
                "pixel_values": torch.stack([pixels, pixels.flip(0)], 1), "image_sizes": torch.tensor([[16, 16]] * 3),
                "batch_num_images": torch.tensor([2, 1]),
            }  # fmt: skip
        case "idefics2" | "idefics3" | "smolvlm":
            nothing = torch.zeros_like(pixels[:1])  # the second row has one image
            return {"pixel_values": torch.cat([pixels, nothing]).view(2, 2, 3, 16, 16)}
    return {"pixel_values": pixels}


_ROUNDED = ("gemma4", "qwen3_5")  # one process is itself further than 1e-5 from float64


class NotMadeError(Exception):
    """One process fails with the small configuration of a type."""


def check(
    kind: str, world: int, *, how: dict[str, Any] | None = None, layout: am.Layout | None = None, **rows: Any
) -> None:
    """Compare loss and all gradients over ranks with one process of Transformers' own attention."""
    tolerance = 1e-4 if kind in _ROUNDED else 1e-5
    try:
        given = batch(kind, **rows)
        whole = small_model(kind, "eager")
        wanted = whole(**given)
        wanted.loss.backward()
    except Exception as error:
        raise NotMadeError(f"{kind}: {type(error).__name__}: {error}") from error

    def rank(comm):
        model = small_model(kind, "attnmesh")
        ranks = am.ContextParallel(comm) if layout is None else am.ContextParallel(comm, layout=layout)
        inputs = am.shard_inputs(ranks, **given, **how or {})
        with torch.autograd.set_multithreading_enabled(False):  # a virtual rank is one thread
            out = model(**inputs)
            out.loss.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return out.loss.detach(), inputs["attention_pass"].unshard(out.logits.detach()), grads

    everyone = on_virtual_ranks(world, rank)
    torch.testing.assert_close(sum(loss for loss, _, _ in everyone), wanted.loss.detach(), rtol=2e-6, atol=0)
    real = given["attention_mask"] == 1
    torch.testing.assert_close(everyone[0][1][real], wanted.logits.detach()[real], rtol=1e-4, atol=1e-4)
    for name, weight in whole.named_parameters():
        if weight.grad is None:
            assert all(name not in grads for _, _, grads in everyone), name
            continue
        found = sum(grads[name] for _, _, grads in everyone)
        assert (found - weight.grad).norm() <= tolerance * weight.grad.norm() + 1e-7, (
            name, float((found - weight.grad).norm()), float(weight.grad.norm()),
        )  # fmt: skip


# The table.


def table() -> dict[str, str]:
    """Why each type is refused, or nothing for a type that is served."""
    quiet()
    found: dict[str, str] = {}
    with torch.random.fork_rng():
        for kind in sorted(CONFIGS):
            try:
                check(kind, 2)
                found[kind] = ""
            except ValueError as error:
                found[kind] = reason_of(error)
    return found


def lines(rows: dict[str, str]) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return refused_and_served(
        rows, "models with images", "loss and gradients of one process", len(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )


def written() -> str:
    """The table in the documentation."""
    return written_between(_BEGIN, _END)


if __name__ == "__main__":
    write_between(_BEGIN, lines(table()), _END)
