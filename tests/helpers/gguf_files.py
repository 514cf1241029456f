"""GGUF files taken apart and damaged: a parser that knows where every field lies, and seeded mutations of the bytes."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass
class Parts:
    """A well-formed GGUF file with tensors in float32, field by field."""

    keys: dict[str, bytes] = field(default_factory=dict)  # with names and types, as in the file
    values: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)  # shape as in torch, and data
    integers: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # kind of field: offset and width
    header_bytes: int = 0

    def file(self) -> bytes:
        """Write the file anew."""
        table, data = [], b""
        for name, (shape, content) in self.tensors.items():
            table.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
            table.append(struct.pack("<IQ", 0, len(data)))
            data += content + b"\0" * (-len(content) % _ALIGNMENT)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys)) + b"".join(self.keys.values())
        head += b"".join(table)
        return head + b"\0" * (-len(head) % _ALIGNMENT) + data


def parse(data: bytes) -> Parts:
    """Take a GGUF file with tensors in float32 apart; any exception for other files."""
    parts, at = Parts(), 8

    def integer(kind: str, layout: str) -> int:
        nonlocal at
        width = struct.calcsize(layout)
        parts.integers.setdefault(kind, []).append((at, width))
        (value,) = struct.unpack_from(f"<{layout}", data, at)
        at += width
        return value

    def string(kind: str) -> bytes:
        nonlocal at
        length = integer(kind, "Q")
        at += length
        assert at <= len(data)
        return data[at - length : at]

    def value(kind: int) -> object:
        nonlocal at
        if kind == _STRING:
            return string("string length").decode()
        if kind == _ARRAY:
            inner, count = integer("type", "I"), integer("array count", "Q")
            assert inner != _ARRAY
            return [value(inner) for _ in range(count)]
        if kind in (6, 12):
            at += (width := struct.calcsize(_SCALARS[kind]))
            return struct.unpack_from(f"<{_SCALARS[kind]}", data, at - width)[0]
        return integer("value", _SCALARS[kind])

    assert struct.unpack_from("<I", data, 4)[0] in (2, 3)
    tensors, keys = integer("tensor count", "Q"), integer("key count", "Q")
    for _ in range(keys):
        start = at
        name = string("name length").decode()
        parts.values[name] = value(integer("type", "I"))
        parts.keys[name] = data[start:at]
    table = []
    for _ in range(tensors):
        name = string("name length").decode()
        dimensions = integer("dimensions", "I")
        shape = tuple(integer("dimension", "Q") for _ in range(dimensions))
        kind, offset = integer("tensor type", "I"), integer("offset", "Q")
        assert kind == 0
        table.append((name, tuple(reversed(shape)), offset))
    parts.header_bytes = at
    start = -(-at // (alignment := int(parts.values.get("general.alignment", _ALIGNMENT)))) * alignment
    for name, shape, offset in table:
        size = 4 * int(np.prod(shape))
        assert start + offset + size <= len(data)
        parts.tensors[name] = (shape, data[start + offset : start + offset + size])
    return parts


def llama_weights(parts: Parts) -> dict[str, torch.Tensor]:
    """The weights of a Llama in a GGUF file by their names in Transformers, read independently of the package."""
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.": "model.layers.",
        "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm",
        "output.": "lm_head.",
    }  # fmt: skip
    heads = {
        "attn_q": int(parts.values["llama.attention.head_count"]),
        "attn_k": int(parts.values.get("llama.attention.head_count_kv") or parts.values["llama.attention.head_count"]),
    }
    weights = {}
    for name, (shape, content) in parts.tensors.items():
        values = np.frombuffer(content, "<f4").reshape(shape)
        if name == "rope_freqs.weight" and (values == 1).all():  # as without it
            continue
        for part, count in heads.items():  # llama.cpp's rotary embedding pairs neighbours, not halves
            if part in name:
                values = values.reshape(count, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        for theirs, ours in names.items():
            if theirs in name and not (theirs == "output." and "attn_output" in name):
                name = name.replace(theirs, ours)
        weights[name] = torch.from_numpy(values.copy())
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


# Mutations. Each takes the file, its parts and a random generator, and returns other bytes.

Mutation = Callable[[bytes, Parts, random.Random], bytes]
_EXTREMES = (0, 1, 2, 3, 7, 9, 31, 255, 4096, 10**5, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def _write(data: bytes, at: int, width: int, value: int) -> bytes:
    return data[:at] + (value % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]


def _change(kind: str) -> Mutation:
    def change(data: bytes, parts: Parts, chance: random.Random) -> bytes:
        at, width = chance.choice(parts.integers[kind])
        old = int.from_bytes(data[at : at + width], "little")
        new = chance.choice([*_EXTREMES, old + 1, old - 1, old * 2, old // 2, old + 32, -1, chance.getrandbits(64)])
        return _write(data, at, width, new)

    return change


def flip_bit_of_header(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    at = chance.randrange(parts.header_bytes)
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def flip_bit_of_weights(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    at = chance.randrange(parts.header_bytes, len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def overwrite(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    at = chance.randrange(parts.header_bytes)
    noise = chance.randbytes(chance.choice([1, 4, 8, 64]))
    return data[:at] + noise + data[at + len(noise) :]


def truncate(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    return data[: chance.choice([chance.randrange(len(data)), chance.randrange(parts.header_bytes), len(data) - 1])]


def append(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.choice([1, 31, 33, 4096]))


def cut_out(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    at, length = chance.randrange(4, len(data)), chance.choice([1, 4, 8, 32, 100])
    return data[:at] + data[at + length :]


def insert(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    at = chance.randrange(4, parts.header_bytes)
    return data[:at] + chance.randbytes(chance.choice([1, 4, 8, 32])) + data[at:]


def remove_tensors(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    count = chance.choice([1, 1, 2, len(parts.tensors)])
    for name in chance.sample(sorted(parts.tensors), count):
        del parts.tensors[name]
    return parts.file()


def add_tensor(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    shape = chance.choice([(32,), (32, 32), (1, 1)])
    name = chance.choice(["blk.7.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight", "token_types.weight", "x"])
    parts.tensors[name] = (shape, np.full(shape, chance.choice([1, 2]), "<f4").tobytes())
    return parts.file()


def rename_tensor(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    old = chance.choice(sorted(parts.tensors))
    new = chance.choice([*sorted(parts.tensors), old + "x", old[1:], "", old.replace("weight", "bias")])
    file = parts.file()  # by bytes, since another tensor may have this name
    return file.replace(_string(old), _string(new), 1)


def reshape_tensor(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    name = chance.choice(sorted(parts.tensors))
    shape, content = parts.tensors[name]
    size = int(np.prod(shape))
    parts.tensors[name] = (chance.choice([(size,), (1, size), (size, 1), (2, size // 2), shape[::-1]]), content)
    return parts.file()


def remove_key(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    for name in chance.sample(sorted(parts.keys), chance.choice([1, 1, 3, len(parts.keys)])):
        del parts.keys[name]
    return parts.file()


def repeat_key(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    name = chance.choice(sorted(parts.keys))
    parts.keys[f"{name} again"] = parts.keys[name]
    return parts.file()


def set_size(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    name = chance.choice([name for name in sorted(parts.keys) if name.startswith("llama.")])
    value = chance.choice([*_EXTREMES, 10, 48, 64])
    parts.keys[name] = _string(name) + struct.pack("<IQ", 10, value)
    return parts.file()


def set_real(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    name = chance.choice(["llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.block_count"])
    value = chance.choice([float("nan"), float("inf"), -1.0, 0.0, 2.0, 1e308])
    parts.keys[name] = _string(name) + struct.pack("<Id", 12, value)
    return parts.file()


def set_text(data: bytes, parts: Parts, chance: random.Random) -> bytes:
    name = chance.choice(["general.architecture", "general.name", "tokenizer.ggml.model", "llama.rope.scaling.type"])
    text = chance.choice(["", "gpt2", "t5", "mistral", "llama", "linear", "../../x", "a\nb\x1b[31m", "x" * 5000])
    parts.keys[name] = _string(name) + struct.pack("<I", _STRING) + _string(text)
    return parts.file()


MUTATIONS: dict[str, Mutation] = {
    **{
        f"change {kind}": _change(kind)
        for kind in (
            "tensor count", "key count", "array count", "string length", "name length", "type", "tensor type",
            "dimensions", "dimension", "offset", "value",
        )
    },
    **{
        mutation.__name__: mutation
        for mutation in (
            flip_bit_of_header, flip_bit_of_weights, overwrite, truncate, append, cut_out, insert, remove_tensors,
            add_tensor, rename_tensor, reshape_tensor, remove_key, repeat_key, set_size, set_real, set_text,
        )
    },
}  # fmt: skip


def mutated(data: bytes, name: str, seed: int) -> bytes:
    """Apply a mutation with a seed of its own."""
    return MUTATIONS[name](data, parse(data), random.Random(f"{name} {seed}"))
