"""Damaged and hostile GGUF files: each loads exactly what it says, or is refused in one line, without delay."""

import os
import shutil
import socket
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from attnmesh.models.checkpoint import ModelError
from attnmesh.models.gguf import cache_folder, converted_folder, read_header
from attnmesh.models.loading import load_model
from helpers.cases import sweep
from helpers.gguf_files import MUTATIONS, llama_weights, mutated, parse
from helpers.memory import little_memory
from helpers.models import tiny_llama, write_folder, write_gguf

SEEDS = 5
SECONDS = 20


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny_llama()).read_bytes()


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked at the terminal"))
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "model.gguf"


def outcome(file: Path) -> str:
    """Load a file and compare with what it says: "loaded", or the reason for which it is refused."""
    start = time.perf_counter()
    try:
        with little_memory():
            model, _ = load_model(file, attn_implementation="sdpa")
    except ModelError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) < 1000
        assert not any(word in said.lower() for word in ("alloc", "out of memory", "memoryerror")), said
        assert not list(cache_folder().glob("gguf-*[0-9a-f]")), "refused, but in the cache"
        return said
    finally:
        assert time.perf_counter() - start < SECONDS
    parts = parse(file.read_bytes())
    expected, weights = llama_weights(parts), model.state_dict()
    assert set(expected) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, equal_nan=True)
    config, values = model.config, {name.removeprefix("llama."): value for name, value in parts.values.items()}
    assert config.num_hidden_layers == values["block_count"]
    assert config.num_attention_heads == values["attention.head_count"]
    assert config.rms_norm_eps == values["attention.layer_norm_rms_epsilon"]
    assert config.rope_parameters["rope_theta"] == values.get("rope.freq_base", 10000)
    return "loaded"


def test_the_original_loads(original, file):
    assert parse(original).file() == original
    file.write_bytes(original)
    assert outcome(file) == "loaded"


@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_headers_are_refused_in_one_line(original, file, name):
    for seed in range(8):
        file.write_bytes(mutated(original, name, seed))
        start = time.perf_counter()
        said = ""
        try:
            read_header(file)
        except ModelError as error:
            said = str(error)
        assert "\n" not in said, seed
        assert time.perf_counter() - start < SECONDS, seed


@pytest.mark.parametrize(
    ("name", "seed", "said"),
    [
        ("flip_bit_of_weights", 0, "loaded"),
        ("remove_tensors", 0, "it has 16,032 elements instead of 16,544; it lacks 'blk.0.attn_v.weight'"),
        ("remove_tensors", 1, "it has 0 tensors for 2 layers"),
        ("add_tensor", 0, "it has 'blk.7.attn_q.weight', which the model does not"),
        ("rename_tensor", 2, "it lacks 'model.layers.0.mlp.gate_proj.weight'"),
        ("reshape_tensor", 0, "'model.layers.0.self_attn.v_proj.weight' has the shape (2, 256) instead of (16, 32)"),
    ],
)
def test_a_damaged_file_is_loaded_exactly_or_refused(original, file, name, seed, said):
    file.write_bytes(mutated(original, name, seed))
    assert said in outcome(file)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_files_are_loaded_exactly_or_refused(original, file, name):
    loaded = 0
    for seed in range(SEEDS):
        file.write_bytes(mutated(original, name, seed))
        print(f"{name}, seed {seed}: ", end="", flush=True)
        said = outcome(file)
        print(said)
        loaded += said == "loaded"
        shutil.rmtree(cache_folder(), ignore_errors=True)
    print(f"{name}: {loaded} of {SEEDS} loaded, the others were refused")


# Sizes.


def with_key(original: bytes, name: str, value: int | float | str) -> bytes:
    """The file with a metadata key set."""
    parts = parse(original)
    kind = {int: "<IQ", float: "<Id"}
    name_bytes = struct.pack("<Q", len(name)) + name.encode()
    if isinstance(value, str):
        parts.keys[name] = name_bytes + struct.pack("<IQ", 8, len(value)) + value.encode()
    else:
        parts.keys[name] = name_bytes + struct.pack(kind[type(value)], 10 if isinstance(value, int) else 12, value)
    return parts.file()


def test_a_file_without_tensors_and_sizes_builds_no_default_model(original, file):
    parts = parse(original)
    parts.tensors.clear()
    file.write_bytes(parts.file())
    assert "it has 0 tensors for 2 layers" in outcome(file)
    for name in list(parts.keys):
        if name.startswith("llama."):
            del parts.keys[name]
    file.write_bytes(parts.file())
    assert outcome(file) == f"{file} has no llama.block_count"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("llama.block_count", 10**5, "must be at most 4,096, got 100,000"),
        ("llama.block_count", 4096, "it has 21 tensors for 4,096 layers"),
        ("llama.embedding_length", 2**24, "elements instead of"),
        ("llama.feed_forward_length", 2**24, "elements instead of"),
        ("llama.attention.head_count", 2**40, "must be at most 65,536"),
        ("llama.vocab_size", 2**24, "elements instead of"),
        ("llama.vocab_size", 2**40, "must be at most 16,777,216"),
        ("llama.context_length", 2**62, "must be at most 2,147,483,648"),
        ("llama.expert_count", 2**60, "must be at most 65,536"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "must be finite, got nan"),
        sweep("llama.rope.scaling.type", "linear", "has rope.scaling.type 'linear', which Transformers does not read"),
        sweep("llama.attention.sliding_window", 8, "has attention.sliding_window 8, which Transformers does not read"),
        sweep("general.architecture", "a\nb", "must name its family in general.architecture, got 'a\\nb'"),
    ],
)
def test_sizes_are_checked_before_anything_is_built(original, file, name, value, said):
    file.write_bytes(with_key(original, name, value))
    assert said in outcome(file)


def test_rope_factors_are_refused_unless_they_change_nothing(original, file):
    parts = parse(original)
    for factor, said in ((1, "loaded"), (2, "has the tensor 'rope_freqs.weight', which Transformers does not read")):
        parts.tensors["rope_freqs.weight"] = ((4,), np.full(4, factor, "<f4").tobytes())
        file.write_bytes(parts.file())
        shutil.rmtree(cache_folder(), ignore_errors=True)
        assert said in outcome(file)


@pytest.mark.parametrize("name", ["attention.sliding_window", "final_logit_softcapping"])
def test_what_transformers_does_not_read_of_the_family_is_refused(original, file, name):
    parts, key = parse(original), f"llama.{name}".encode()
    parts.keys[key.decode()] = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 7)
    file.write_bytes(parts.file())
    assert f"has {name} 7, which Transformers does not read" in outcome(file)


def test_a_hole_of_terabytes_is_not_read(original, file):
    file.write_bytes(original)
    os.truncate(file, 2**40)
    assert "it has 1,099,511,627,776 bytes, and its tensors need 68,416" in outcome(file)
    try:
        os.truncate(file, 2**42)
    except OSError:
        return  # larger than this file system allows
    assert "must have at most 2,199,023,255,552 bytes" in outcome(file)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_not_a_file_is_refused_at_once(file, monkeypatch, kind):
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "socket":
        monkeypatch.chdir(file.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    else:
        file = Path("/dev/zero")
    assert outcome(file) == f"{file} must be a file, got a {kind}"


# Files beside it.


def test_files_beside_a_gguf_are_not_used(original, file, tmp_path):
    """Neither a tokenizer, a configuration nor code beside the file is read, run or asked about."""
    file.write_bytes(original)
    beside = write_folder(file.parent)  # a whole model with another tokenizer
    ran = tmp_path / "ran"
    (beside / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    auto_map = '"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}'
    (beside / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "Evil", {auto_map}}}')
    (beside / "config.json").write_text(f'{{"model_type": "evil", {auto_map}}}')
    (beside / "generation_config.json").write_text('{"eos_token_id": 9}')
    (beside / "chat_template.jinja").write_text("evil")
    (beside / "tokenizer.json").write_text((beside / "tokenizer.json").read_text().replace('"a"', '"evil"'))
    assert outcome(file) == "loaded"
    model, tokenizer = load_model(file, attn_implementation="sdpa")
    assert tokenizer.convert_tokens_to_ids(["<s>", "a"]) == [0, 3]
    assert tokenizer.chat_template is None
    assert model.generation_config.eos_token_id == 1
    assert not ran.exists()
    assert "evil" not in (converted_folder(file) / "tokenizer.json").read_text()


def test_a_file_that_changes_during_conversion_is_not_cached(original, file, monkeypatch):
    file.write_bytes(original)
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained

    def and_touch(*args, **kwargs):
        os.utime(file, (1, 1))
        return load(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", and_touch)
    assert outcome(file) == f"{file} changed while it was converted"
