"""Checkpoint folders that are damaged or made to harm: each kind changes a good folder.

A kind returns nothing. Code that a folder brings along writes the file `ran` beside the folder.
"""

import json
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

Kind = Callable[[Path], None]


def ran(folder: Path) -> Path:
    """The file that exists if code of the folder was run."""
    return folder.parent / "ran"


def _code(folder: Path) -> str:
    return f"open({str(ran(folder))!r}, 'w').close()\nclass Evil: pass\ndef generate(*a, **k): pass\n"


class _Evil:
    """Runs code when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return exec, (_code(self.folder),)


def _pickle(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(_Evil(folder)))
    (folder / "evil.py").write_text(_code(folder))


def _set(name: str, **fields: object) -> Kind:
    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | fields))
        (folder / "evil.py").write_text(_code(folder))

    return change


def _drop(name: str, field: str) -> Kind:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        del values[field]
        (folder / name).write_text(json.dumps(values))

    return change


def _content(name: str, data: bytes) -> Kind:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def _cut(name: str, length: int) -> Kind:
    return lambda folder: os.truncate(folder / name, length if length >= 0 else os.path.getsize(folder / name) + length)


def _instead(name: str, what: str) -> Kind:
    """Replace a file by something that is not one."""

    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if what == "FIFO":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "socket":
            before = Path.cwd()
            os.chdir(path.parent)  # the address of a socket is short
            try:
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(path.name)
            finally:
                os.chdir(before)
        elif what == "nothing":
            pass
        else:
            path.symlink_to(what)

    return change


def _deep(name: str) -> Kind:
    return _content(name, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


# Weights.

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Kind:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / _FILE)
        change(tensors)
        save_file(tensors, folder / _FILE, metadata={"format": "pt"})

    return apply


def _header(header: dict[str, object] | bytes, length: int | None = None, data: bytes = b"\0" * 64) -> Kind:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _content(_FILE, struct.pack("<Q", len(text) if length is None else length) + text + data)


def _one(dtype: str = "F32", shape: object = (16,), offsets: object = (0, 64)) -> dict[str, object]:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def _indexed(name: str) -> Kind:
    def change(folder: Path) -> None:
        (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": name}}))
        (folder / _FILE).rename(folder / "weights.safetensors")
        _pickle(folder, "evil.bin")

    return change


def _two_files(folder: Path) -> None:
    os.link(folder / _FILE, folder / "a.safetensors")
    (folder / _FILE).rename(folder / "b.safetensors")
    files = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _only_a_pickle(folder: Path) -> None:
    (folder / _FILE).unlink()
    _pickle(folder, "pytorch_model.bin")


def _pickle_in_disguise(folder: Path) -> None:
    _pickle(folder, _FILE)


def _tied_but_different(folder: Path) -> None:
    _set("config.json", tie_word_embeddings=True)(folder)


def _custom_generate(folder: Path) -> None:
    _content("custom_generate/generate.py", _code(folder).encode())(folder)
    _content("custom_generate/requirements.txt", b"")(folder)


def _many_files(folder: Path) -> None:
    for number in range(2000):
        (folder / f"{number}.json").touch()


_NAMES = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
_CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil"] * 2}
_AUTO = {"auto_map": _CODE}
_REMOTE = {"auto_map": dict.fromkeys(_CODE, "someone/evil--evil.Evil")}
_NOT_RUN = "needs code that comes with the model, which is not run"

LOADS = "loads"
"""The model is loaded, with exactly the weights of its files."""

KINDS: dict[str, tuple[Kind, str]] = {
    # config.json
    "config empty": (_content("config.json", b""), "config.json cannot be read"),
    "config cut": (_cut("config.json", -5), "config.json cannot be read"),
    "config is a list": (_content("config.json", b"[1]"), "must hold one JSON object, got list"),
    "config is null": (_content("config.json", b"null"), "must hold one JSON object, got NoneType"),
    "config not UTF-8": (_content("config.json", b'{"a": "\xff"}'), "config.json cannot be read"),
    "config UTF-16": (_content("config.json", '{"a": 1}'.encode("utf-16")), "config.json cannot be read"),
    "config deep": (_deep("config.json"), "config.json cannot be read"),
    "config deep list": (_content("config.json", b"[" * 100_000), "config.json cannot be read"),
    "config digits": (_content("config.json", b'{"n": ' + b"9" * 10_000 + b"}"), "config.json cannot be read"),
    "config huge": (_cut("config.json", 2**30), "must have at most 268,435,456 bytes"),
    "config FIFO": (_instead("config.json", "FIFO"), "has no config.json"),
    "config folder": (_instead("config.json", "folder"), "has no config.json"),
    "config loop": (_instead("config.json", "config.json"), "has no config.json"),
    "config device": (_instead("config.json", "/dev/zero"), "has no config.json"),
    "family unknown": (_set("config.json", model_type="evil"), "config.json cannot be read"),
    "family a list": (_set("config.json", model_type=["llama"]), "config.json cannot be read"),
    "family missing": (_drop("config.json", "model_type"), "config.json cannot be read"),
    "family with code": (_set("config.json", model_type="evil", **_AUTO), _NOT_RUN),
    "code unused": (_set("config.json", **_AUTO), LOADS),
    "code elsewhere": (_set("config.json", **_REMOTE), LOADS),
    "code elsewhere, family": (
        _set("config.json", model_type="evil", **_REMOTE),
        _NOT_RUN,
    ),
    "layers -1": (_set("config.json", num_hidden_layers=-1), "must be a positive integer, got -1"),
    "layers 0": (_set("config.json", num_hidden_layers=0), "must be a positive integer, got 0"),
    "layers 1": (_set("config.json", num_hidden_layers=1), "'model.layers.1.mlp.gate_proj.weight' and 6 more, which"),
    "layers 3": (_set("config.json", num_hidden_layers=3), "it lacks 'model.layers.2.input_layernorm.weight'"),
    "layers 4096": (_set("config.json", num_hidden_layers=4096), "it has 21 tensors for 4,096 layers"),
    "layers 10^5": (_set("config.json", num_hidden_layers=10**5), "must be at most 4,096, got 100,000"),
    "layers 2^63": (_set("config.json", num_hidden_layers=2**63), "must be at most 4,096"),
    "layers text": (_set("config.json", num_hidden_layers="2"), "must be a positive integer, got '2'"),
    "layers 2.0": (_set("config.json", num_hidden_layers=2.0), "must be a positive integer, got 2.0"),
    "layers true": (_set("config.json", num_hidden_layers=True), "must be a positive integer, got True"),
    "layers NaN": (_set("config.json", num_hidden_layers=float("nan")), "must be a positive integer, got nan"),
    "layers listed": (_set("config.json", num_hidden_layers=[2]), "config.json cannot be read"),
    "layers long list": (_set("config.json", num_hidden_layers=[2] * 10**5), "at most 4,096 entries, got 100,000"),
    "layers missing": (_drop("config.json", "num_hidden_layers"), "it has 21 tensors for 32 layers"),
    "hidden 2^24": (_set("config.json", hidden_size=2**24, head_dim=8), "elements instead of"),
    "hidden -32": (_set("config.json", hidden_size=-32), "must be a positive integer, got -32"),
    "hidden text": (_set("config.json", hidden_size="x" * 10**5), "hidden_size in"),
    "vocabulary 2^24": (_set("config.json", vocab_size=2**24), "elements instead of"),
    "vocabulary 2^40": (_set("config.json", vocab_size=2**40), "must be at most 16,777,216"),
    "vocabulary 15": (_set("config.json", vocab_size=15), "has the shape (16, 32) instead of (15, 32)"),
    "heads 3": (_set("config.json", num_attention_heads=3), "config.json cannot be read"),
    "heads 2^40": (_set("config.json", num_attention_heads=2**40), "must be at most 65,536"),
    "kv heads 4": (_set("config.json", num_key_value_heads=4), "instead of (32, 32)"),
    "head dim 2^24": (_set("config.json", head_dim=2**24), "elements instead of"),
    "intermediate 10^9": (_set("config.json", intermediate_size=10**9), "must be at most 16,777,216"),
    "positions 2^62": (_set("config.json", max_position_embeddings=2**62), "must be at most 2,147,483,648"),
    "experts": (_set("config.json", num_local_experts=2**16), LOADS),
    "labels 10^10": (_set("config.json", num_labels=10**10), "must be at most 65,536"),
    "attention types": (_set("config.json", attention_types=[[["global"], 10**10]]), "must be at most 4,096"),
    "family with a large mask": (_set("config.json", model_type="gpt2", n_positions=2**31), ""),
    "blocks": (_set("config.json", model_type="xlstm", num_blocks=2**40), "must be at most 4,096"),
    "blocks 4096": (_set("config.json", model_type="xlstm", num_blocks=4096, architectures=None), ""),
    "nested layers": (_set("config.json", text_config={"num_hidden_layers": 10**9}), "must be at most 4,096"),
    "rope nonsense": (_set("config.json", rope_parameters={"rope_type": "evil"}), ""),
    "rope text": (_set("config.json", rope_parameters={"rope_theta": "x", "rope_type": "default"}), ""),
    "activation": (_set("config.json", hidden_act="evil"), "cannot be built"),
    "dtype nonsense": (_set("config.json", dtype="evil"), ""),
    "attention kernel": (_set("config.json", attn_implementation="someone/evil"), LOADS),
    "attention kernel 2": (_set("config.json", _attn_implementation="someone/evil"), LOADS),
    "experts kernel": (_set("config.json", _experts_implementation="someone/evil"), ""),
    "fusion": (_set("config.json", fusion_config={"evil": True}), ""),
    "quantized unknown": (_set("config.json", quantization_config={"quant_method": "evil"}), ""),
    "quantized gptq": (_set("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), ""),
    "quantized mxfp4": (_set("config.json", quantization_config={"quant_method": "mxfp4"}), ""),
    "quantized default": (
        lambda folder: (
            _set("config.json", quantization_config={"quant_method": "mxfp4"}, hidden_size=8192)(folder),
            _set("config.json", vocab_size=128256, intermediate_size=28672)(folder),
        )[0],
        "elements instead of",
    ),
    "classifier": (_set("config.json", architectures=["LlamaForSequenceClassification"]), "must be a causal language"),
    "architecture unknown": (_set("config.json", architectures=["Evil"]), "must be a causal language model"),
    "weights elsewhere": (_set("config.json", transformers_weights="../evil.safetensors"), "must not name its weights"),
    "tied but different": (_tied_but_different, ""),
    # generation_config.json
    "generation garbage": (_content("generation_config.json", b"\xff"), ""),
    "generation deep": (_deep("generation_config.json"), ""),
    "generation end": (_set("generation_config.json", eos_token_id=[[]]), "eos_token_id in"),
    "generation end 1.5": (_set("generation_config.json", eos_token_id=1.5), "must be a token id or a list of them"),
    "architectures": (_set("config.json", architectures=[None]), "architectures in"),
    "generation FIFO": (_instead("generation_config.json", "FIFO"), "must be a file, got a FIFO"),
    "generation kernel": (_set("generation_config.json", custom_generate="evil", cache_implementation="evil"), ""),
    "generation code": (_custom_generate, LOADS),
    # tokenizer
    "tokenizer empty": (_content("tokenizer.json", b""), "tokenizer in"),
    "tokenizer garbage": (_content("tokenizer.json", os.urandom(1000)), "tokenizer in"),
    "tokenizer cut": (_cut("tokenizer.json", -50), "tokenizer in"),
    "tokenizer deep": (_deep("tokenizer.json"), "tokenizer in"),
    "tokenizer FIFO": (_instead("tokenizer.json", "FIFO"), "must be a file, got a FIFO"),
    "tokenizer socket": (_instead("tokenizer.json", "socket"), "must be a file, got a socket"),
    "tokenizer device": (_instead("tokenizer.json", "/dev/zero"), "must be a file, got a device"),
    "tokenizer folder": (_instead("tokenizer.json", "folder"), "tokenizer in"),
    "tokenizer huge": (_cut("tokenizer.json", 2**30), "must have at most"),
    "tokenizer model unknown": (_set("tokenizer.json", model={"type": "Evil"}), "tokenizer in"),
    "tokenizer id 2^63": (
        _set("tokenizer.json", model={"type": "WordLevel", "unk_token": "a", "vocab": {"a": 2**63}}),
        "tokenizer in",
    ),
    "tokenizer with code": (
        _set("tokenizer_config.json", tokenizer_class="Evil", **_AUTO),
        _NOT_RUN,
    ),
    "tokenizer with unused code": (_set("tokenizer_config.json", **_AUTO), ""),
    "tokenizer class unknown": (_set("tokenizer_config.json", tokenizer_class="Evil"), ""),
    "tokenizer class a list": (_set("tokenizer_config.json", tokenizer_class=["Evil"]), "tokenizer in"),
    "tokenizer file elsewhere": (_set("tokenizer_config.json", fast_tokenizer_files=["../../evil.json"]), ""),
    "tokenizer config FIFO": (_instead("tokenizer_config.json", "FIFO"), "must be a file, got a FIFO"),
    "tokenizer config garbage": (_content("tokenizer_config.json", b"{"), "tokenizer in"),
    "template FIFO": (_instead("additional_chat_templates/a.jinja", "FIFO"), "must be a file, got a FIFO"),
    "template garbage": (_content("chat_template.jinja", b"{% evil"), ""),
    "special tokens garbage": (_content("special_tokens_map.json", b"[1]"), ""),
    "added tokens FIFO": (_instead("added_tokens.json", "FIFO"), "must be a file, got a FIFO"),
    # weights
    "weights missing": (_instead(_FILE, "nothing"), "has no weights"),
    "weights FIFO": (_instead(_FILE, "FIFO"), "must be a file, got a FIFO"),
    "weights folder": (_instead(_FILE, "folder"), "has no weights"),
    "weights device": (_instead(_FILE, "/dev/zero"), "must be a file, got a device"),
    "weights empty": (_content(_FILE, b""), "is damaged"),
    "weights pickled": (_only_a_pickle, "has no weights"),
    "weights a pickle in disguise": (_pickle_in_disguise, "is damaged"),
    "weights and a pickle": (lambda folder: _pickle(folder, "pytorch_model.bin"), LOADS),
    "weights and a pickled index": (lambda folder: _pickle(folder, "pytorch_model.bin.index.json"), LOADS),
    "weights and metadata": (lambda folder: _pickle(folder, ".metadata"), LOADS),
    "weights cut": (_cut(_FILE, -1), "is damaged"),
    "weights with more bytes": (_cut(_FILE, 10**6), "is damaged"),
    "header 2^63": (_header(_one(), 2**63), "is damaged"),
    "header past the end": (_header(_one(), 10**6), "is damaged"),
    "header no JSON": (_header(b"evil"), "is damaged"),
    "header deep": (_header(b'{"a":' * 50_000), "is damaged"),
    "header shape": (_header(_one(shape=(2**62, 2**62))), "is damaged"),
    "header negative": (_header(_one(shape=(-1, 16))), "is damaged"),
    "header overlap": (_header(_one() | {"a": _one()["model.norm.weight"]}), "is damaged"),
    "header offsets": (_header(_one(offsets=(0, 2**60))), "is damaged"),
    "header dtype": (_header(_one(dtype="EVIL")), "is damaged"),
    "tensor missing": (_tensors(lambda tensors: tensors.pop(_NAMES[2])), f"it lacks '{_NAMES[2]}'"),
    "tensor extra": (_tensors(lambda t: t.update(evil=torch.zeros(3))), "it has 'evil', which the model does not"),
    "tensor for another": (
        _tensors(lambda tensors: tensors.update(evil=tensors.pop(_NAMES[2]))),
        f"it lacks '{_NAMES[2]}'; it has 'evil', which the model does not",
    ),
    "tensor reshaped": (
        _tensors(lambda tensors: tensors.update({_NAMES[2]: tensors[_NAMES[2]].view(16, 64)})),
        f"'{_NAMES[2]}' has the shape (16, 64) instead of (32, 32)",
    ),
    "tensor of integers": (_tensors(lambda t: t.update({_NAMES[1]: torch.ones(32, dtype=torch.int32)})), "got I32 for"),
    "tensor of NaN": (_tensors(lambda t: t.update({_NAMES[1]: torch.full((32,), float("nan"))})), LOADS),
    "index to a pickle": (_indexed("evil.bin"), "must name safetensors files in the same folder, got 'evil.bin'"),
    "index elsewhere": (_indexed("../evil.safetensors"), "must name safetensors files in the same folder"),
    "index absolute": (_indexed("/tmp/evil.safetensors"), "must name safetensors files in the same folder"),
    "index of nothing": (_indexed("gone.safetensors"), "lacks the weight files gone.safetensors"),
    "index of a list": (
        lambda folder: ((folder / _FILE).unlink(), _content(_INDEX, b'{"weight_map": [1]}')(folder))[0],
        "is damaged",
    ),
    "two files": (_two_files, "in two files"),
    "distributed": (_content("shard-00001-model-00001-of-00001.safetensors", b""), "distributed checkpoints are not"),
    "adapter": (_set("adapter_config.json", base_model_name_or_path="someone/evil"), "adapters are not supported"),
    "many files": (_many_files, LOADS),
}

QUICK = (
    "config deep", "config FIFO", "family with code", "code unused", "layers -1", "layers 1", "layers 10^5",
    "layers missing", "hidden 2^24", "labels 10^10", "quantized default", "generation code", "tokenizer deep",
    "tokenizer FIFO", "tokenizer with code", "template FIFO", "weights FIFO", "weights pickled",
    "weights a pickle in disguise", "weights and a pickle", "header shape", "tensor missing", "tensor extra",
    "tensor reshaped", "tensor of integers", "index to a pickle", "index elsewhere", "distributed", "adapter",
)  # fmt: skip
"""One of each sort."""


# Random damage.

_ODD = (
    None, True, -1, 0, 2**31, 2**63, 1e308, float("nan"), "", "x" * 1000, "\x1b[31m\n", [], [[]], {}, {"a": []}, [None],
)  # fmt: skip


def damage(folder: Path, chance: random.Random) -> str:
    """Change a byte or a value of one of the folder's JSON files; returns which."""
    path = folder / chance.choice(["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    data = path.read_bytes()
    if chance.random() < 0.3:
        at = chance.randrange(len(data))
        path.write_bytes(
            data[:at] + chance.choice([b"", b"0", b'"', b"\xff", b"{", chance.randbytes(1)]) + data[at + 1 :]
        )
        return f"byte {at} of {path.name}"
    values = json.loads(data)
    places = list(_places(values))
    container, key = chance.choice(places)
    container[key] = chance.choice(_ODD)
    path.write_text(json.dumps(values))
    return f"{key!r} in {path.name}: {container[key]!r}"


def _places(values: object) -> Iterator[tuple[dict | list, object]]:
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        yield values, key
        if isinstance(value, dict | list):
            yield from _places(value)
