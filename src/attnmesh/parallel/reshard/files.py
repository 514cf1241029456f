"""`save_cache` and `load_cache`: a KV cache as files, one per rank, that any number of ranks can load.

A folder has `manifest.json`, which is written last, and a `CacheFile` for every rank that holds something no earlier
rank holds.

A `CacheFile` has the keys and values of one rank: a safetensors file with, per sequence, the tensors
`sequence.ROW.keys` and `.values` (of latents only `.keys`), and with int8 and bfp8 `.key_scales` and `.value_scales`:
[tokens, layers, kv heads, ...] of the positions that the rank holds, in ascending order. Positions that a sequence
shares with an earlier one are stored with that one only. `checksums` has a CRC-32 for each chunk.

The header of a file follows from the manifest: a file with another one is not read. Files are read and written chunk by
chunk, `CHUNK_BYTES` (or one token) at a time.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core import ranges
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.ops.storage import BFP_GROUP, bytes_per_token
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.api import Source, share_holders, source_of
from attnmesh.parallel.reshard.contents import CacheContents, CacheTokens
from attnmesh.parallel.reshard.goal import Goal, Holders, Target, device_of, target_ranks
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Move, Part, plan_moves
from attnmesh.utils.files import check_file, read_json
from attnmesh.utils.validation import check_count, check_list, check_path, check_type, shown

FORMAT, VERSION = "attnmesh KV cache", 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 22
_MAX_FILE_BYTES = 1 << 60
_STORED = {"bf16": ("BF16", 2), "fp16": ("F16", 2), "fp32": ("F32", 4), "fp8": ("F8_E4M3", 1)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Entry(NamedTuple):
    """A tensor in a file; `kind` is what safetensors calls its dtype."""

    name: str
    kind: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.itemsize * torch.Size(self.shape).numel()


class _Chunk(NamedTuple):
    """Tokens of a sequence, and the number of their first checksum: there is one for each tensor."""

    row: int
    tokens: range
    checksum: int


@dataclass(frozen=True)
class CacheFile:
    """The file of rank `rank` of a sharding, which holds `part` of a cache. All files of a cache have the same `id`."""

    name: str
    part: Part
    sharding: DecodeSharding
    rank: int
    contents: CacheContents
    id: str

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self._entries)

    @cached_property
    def header(self) -> bytes:
        """The bytes before the data."""
        metadata = {"format": FORMAT, "version": str(VERSION), "id": self.id, "rank": str(self.rank)}
        tensors = {
            name: {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": [begin, begin + entry.nbytes]}
            for entry in self._entries
            for name, begin in [(entry.name, self._offsets[entry.name])]
        }
        text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, out: BinaryIO, tokens: CacheTokens) -> None:
        """Write the file from the cache of the rank."""
        out.write(self.header)
        checksums = torch.zeros(self._checksums.shape, dtype=torch.int64, device="cpu")
        for chunk in self._chunks():
            indices = torch.arange(chunk.tokens.start, chunk.tokens.stop, dtype=torch.int64, device="cpu")
            slots = tokens.slots([(chunk.row, self._positions(chunk.row, indices))])
            stored = tokens.read_slots(slots, self.part.heads)
            for i, (x, entry) in enumerate(zip(stored, self._sequences[chunk.row], strict=True)):
                data = _buffer(x.transpose(0, 1).contiguous())
                checksums[chunk.checksum + i] = zlib.crc32(data)
                out.seek(self._place(entry, chunk)[0])
                out.write(data)
        out.seek(len(self.header) + self._offsets["checksums"])
        out.write(_buffer(checksums.to(torch.uint32)))

    def check(self, folder: Path) -> None:
        """Raise ValueError unless the folder has a file of this size with this header."""
        path = folder / self.name
        check_file(path, f"folder: {path}", most=_MAX_FILE_BYTES)
        size = path.stat().st_size
        if size != self.size:
            raise ValueError(f"folder: {path} must have {self.size:,} bytes by {MANIFEST}, got {size:,}")
        with open(path, "rb") as opened:
            if opened.read(len(self.header)) != self.header:
                raise ValueError(f"folder: {path} must have the header that {MANIFEST} requires: it belongs elsewhere")

    def read(self, folder: Path, move: Move, tokens: CacheTokens) -> None:
        """Read the tokens of a move and store them; raises ValueError if they are damaged."""
        path = folder / self.name
        name = f"folder: {path}"
        with open(path, "rb") as opened:
            opened.seek(len(self.header) + self._offsets["checksums"])
            checksums = torch.frombuffer(bytearray(opened.read(self._checksums.nbytes)), dtype=torch.uint32).tolist()
            wanted = self._wanted(move)
            for chunk in self._chunks():
                selected = _within(chunk.tokens, wanted.get(chunk.row, []))
                if selected:
                    self._store(self._read_chunk(opened, chunk, checksums, name), chunk, selected, move.heads, tokens)

    def _wanted(self, move: Move) -> dict[int, list[tuple[int, Tensor]]]:
        """By sequence in the file: the rows that tokens go to, and the indices of these tokens, ascending."""
        shard = self.sharding.position_shard(self.rank)
        wanted: dict[int, list[tuple[int, Tensor]]] = {}
        for piece in move.pieces:
            indices = shard.index(ranges.as_tensor(piece.positions)) - self._first[piece.content]
            wanted.setdefault(piece.content, []).append((piece.row, indices.sort().values))
        return wanted

    def _read_chunk(self, opened: BinaryIO, chunk: _Chunk, checksums: list[int], name: str) -> list[Tensor]:
        """The tensors [tokens, layers, heads, ...] of a chunk."""
        stored = []
        for i, entry in enumerate(self._sequences[chunk.row]):
            at, size = self._place(entry, chunk)
            opened.seek(at)
            data = bytearray(opened.read(size))
            if zlib.crc32(data) != checksums[chunk.checksum + i]:
                raise ValueError(f"{name} is damaged: the checksum of {entry.name} differs at token {chunk.tokens[0]}")
            flat = torch.frombuffer(data, dtype=_INTEGERS[entry.itemsize])
            stored.append(flat.view(len(chunk.tokens), *entry.shape[1:]))
        return stored

    def _store(
        self, stored: list[Tensor], chunk: _Chunk, selected: list[tuple[int, Tensor]], heads: range,
        tokens: CacheTokens,
    ) -> None:  # fmt: skip
        first = heads.start - self.part.heads.start
        for row, indices in selected:
            at = indices - chunk.tokens.start
            own = [x[:, :, first : first + len(heads)][at].transpose(0, 1).to(tokens.device) for x in stored]
            tokens.write_slots(tokens.slots([(row, self._positions(chunk.row, indices))]), heads, own)

    # The tensors of the file.

    @cached_property
    def _sequences(self) -> dict[int, list[_Entry]]:
        """The tensors of each sequence, in the order of `CacheTokens.tensors`."""
        return {piece.row: self._of(piece.row, ranges.size(piece.positions)) for piece in self.part.pieces}

    def _of(self, row: int, tokens: int) -> list[_Entry]:
        contents, entries = self.contents, []
        front = (tokens, contents.layers, len(self.part.heads))
        for name, dim in zip(("key", "value"), contents.widths, strict=False):
            kind, itemsize = _STORED.get(contents.storage, ("I8", 1))
            if contents.storage == "fp8_ds_mla":  # scales and the rotary part among the bytes of a token
                kind, dim = "U8", int(bytes_per_token(contents.storage, dim))
            entries.append(_Entry(f"sequence.{row}.{name}s", kind, itemsize, (*front, dim)))
            if contents.storage == "int8":
                entries.append(_Entry(f"sequence.{row}.{name}_scales", "F32", 4, front))
            if contents.storage == "bfp8":
                entries.append(_Entry(f"sequence.{row}.{name}_scales", "I8", 1, (*front, dim // BFP_GROUP)))
        return entries

    @cached_property
    def _checksums(self) -> _Entry:
        chunks = sum(1 for _ in self._chunks())
        return _Entry("checksums", "U32", 4, (chunks * len(self._of(0, 0)),))

    @cached_property
    def _entries(self) -> list[_Entry]:
        """All tensors in the order of the data: wide dtypes first, so that all are aligned."""
        entries = [entry for entries in self._sequences.values() for entry in entries]
        return sorted([*entries, self._checksums], key=lambda entry: -entry.itemsize)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where each tensor begins in the data."""
        offsets, at = {}, 0
        for entry in self._entries:
            offsets[entry.name] = at
            at += entry.nbytes
        return offsets

    def _chunks(self) -> Iterator[_Chunk]:
        per_token = sum(entry.nbytes for entry in self._of(0, 1))
        size, number = max(1, CHUNK_BYTES // per_token), 0
        for row, entries in self._sequences.items():
            tokens = entries[0].shape[0]
            for begin in range(0, tokens, size):
                yield _Chunk(row, range(begin, min(tokens, begin + size)), number)
                number += len(entries)

    def _place(self, entry: _Entry, chunk: _Chunk) -> tuple[int, int]:
        """The offset and the size of a chunk of a tensor, in bytes."""
        per_token = entry.nbytes // entry.shape[0]
        begin = len(self.header) + self._offsets[entry.name]
        return begin + chunk.tokens.start * per_token, len(chunk.tokens) * per_token

    @cached_property
    def _first(self) -> dict[int, int]:
        """The index on the rank of the first token of each sequence: those before it are an earlier sequence's."""
        shard = self.sharding.position_shard(self.rank)
        return {sequence.row: shard.length(sequence.common) for sequence in self.contents.sequences}

    def _positions(self, row: int, indices: Tensor) -> Tensor:
        return self.sharding.position_shard(self.rank).position(indices + self._first[row])


def _buffer(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy on the CPU."""
    return memoryview(x.cpu().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _within(tokens: range, wanted: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """The ascending indices that are in a range, by row, where there are any."""
    bounds = torch.tensor([tokens.start, tokens.stop], dtype=torch.int64, device="cpu")
    selected = []
    for row, indices in wanted:
        first, end = torch.searchsorted(indices, bounds).tolist()
        if first < end:
            selected.append((row, indices[first:end]))
    return selected


_MAX_CAPACITY = 1 << 60


def save_cache(cache: ShardedCache, folder: str | Path, comm: Comm | ProcessGroup | DeviceMesh | None = None) -> None:
    """Write a cache to a folder, which must be empty or not exist. All ranks of the cache must call it.

    Keys and values are written as they are stored, bit by bit, with the sequences, their token ids and fp8 scales. On
    several hosts the folder must be on a shared file system, or its files be brought together before they are loaded.

    Examples:
        >>> import tempfile
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16)
        >>> sizes = dict(batch=1, num_blocks=4, block_size=4, max_length=16, device="cpu")
        >>> cache = am.ShardedCache(am.DecodeSharding(), 0, spec, **sizes)
        >>> cache.mark_written(cache.append([cache.allocate([7, 8, 9])], 3))
        >>> folder = tempfile.mkdtemp()
        >>> am.decode.save_cache(cache, folder)
        >>> am.decode.load_cache(folder, am.DecodeSharding()).sequences[0].length
        3
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[Path, Source], SharedValues]:
        check_type("cache", cache, ShardedCache)
        path = check_path("folder", folder)
        with _file_errors(path, "written"):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ValueError(f"folder must be empty or not exist, got {path}")
        return (path, source_of(cache)), {"device": cache.block_table.device.type}

    path, source = check_on_all_ranks(comm, "save_cache", check_arguments, force=True)
    holders, _ = share_holders(comm, source, source.tokens.device)
    number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=source.tokens.device)
    manifest = _Manifest(holders, f"{int(comm.all_gather(number, [(1,)] * comm.world)[0]):016x}")

    def write() -> tuple[None, SharedValues]:
        with _file_errors(path, "written"):
            path.mkdir(parents=True, exist_ok=True)
            file = manifest.files()[source.rank]
            if file is not None:
                with _replacing(path / file.name) as out:
                    file.write(out, CacheTokens(cache))
        return None, {}

    check_on_all_ranks(comm, "save_cache files", write, force=True)

    def write_manifest() -> tuple[None, SharedValues]:
        if source.rank == 0:
            with _file_errors(path, "written"), _replacing(path / MANIFEST) as out:
                out.write(json.dumps(manifest.to_json()).encode())
        return None, {}

    check_on_all_ranks(comm, "save_cache manifest", write_manifest, force=True)


def load_cache(
    folder: str | Path,
    to: DecodeSharding,
    comm: Comm | ProcessGroup | DeviceMesh | None = None,
    *,
    ranks: Sequence[int] | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    max_length: int | None = None,
    device: torch.device | str | None = None,
) -> ShardedCache | None:
    """The cache that `save_cache` wrote, sharded as `to`, on any number of ranks; the arguments are as for `reshard`.

    All ranks of `comm` must call it and see the folder. A rank reads the chunks that have tokens it needs. Files that
    are missing, damaged, or of another cache raise ValueError on every rank.

    Examples:
        >>> import tempfile
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16)
        >>> sizes = dict(batch=1, num_blocks=4, block_size=4, max_length=16, device="cpu")
        >>> cache = am.ShardedCache(am.DecodeSharding(), 0, spec, **sizes)
        >>> cache.mark_written(cache.append([cache.allocate([7, 8, 9])], 3))
        >>> folder = tempfile.mkdtemp()
        >>> am.decode.save_cache(cache, folder)
        >>> def rank(comm):  # more ranks than it was written by
        ...     return am.decode.load_cache(folder, am.DecodeSharding(cp=2), comm).local.cur_pos.tolist()
        >>> am.run_virtual(2, rank)
        [[1], [0]]
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[Path, _Manifest, Target, Goal, torch.device], SharedValues]:
        path = check_path("folder", folder)
        target = Target(to, target_ranks(ranks, to, comm.world), num_blocks, block_size, max_length)
        on = device_of(None, device)
        manifest = _read_manifest(path)
        goal = target.goal(manifest.holders)
        values = {**target.values(), "device": on.type, "manifest": manifest.id}
        return (path, manifest, target, goal, on), values

    path, manifest, target, goal, on = check_on_all_ranks(comm, "load_cache", check_arguments, force=True)

    def read() -> tuple[ShardedCache | None, SharedValues]:
        if comm.rank not in target.ranks:
            return None, {}
        rank = target.ranks.index(comm.rank)
        files = manifest.files()
        sources = [None if file is None else file.part for file in files]
        # The ranks of the files are not ranks of the comm: this rank comes after them.
        nothing: list[Part | None] = [None] * len(files)
        moves = plan_moves([*sources, None], [*nothing, goal.needs()[rank]])
        needed = [(file, move) for move in moves if (file := files[move.source]) is not None]
        with _file_errors(path, "read"):
            for file, _ in needed:
                file.check(path)
            with propagate_failure(comm):  # too little memory
                made = goal.make_cache(rank, on)
            for file, move in needed:
                file.read(path, move, CacheTokens(made))
        return made, {}

    return check_on_all_ranks(comm, "load_cache files", read, force=True)


@contextmanager
def _file_errors(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the file system into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"folder: {path} cannot be {what}: {error.strerror or error}") from None


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Manifest:
    """What `manifest.json` has: the cache and its sharding, and an id that all files of a cache have."""

    holders: Holders
    id: str

    def files(self) -> list[CacheFile | None]:
        """The file of each rank; None where an earlier rank holds the same."""
        contents, sharding = self.holders.contents, DecodeSharding(*self.holders.sharding)
        files: list[CacheFile | None] = []
        seen: set[tuple[Any, ...]] = set()
        for rank, part in enumerate(contents.parts(sharding)):
            place = sharding.place(rank)
            held = (part.heads, place.cp, place.kvdp)
            name = f"rank-{rank:05d}-of-{sharding.ranks:05d}.safetensors"
            files.append(None if held in seen else CacheFile(name, part, sharding, rank, contents, self.id))
            seen.add(held)
        return files

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON."""
        holders = self.holders
        return {
            "format": FORMAT, "version": VERSION, "id": self.id, "block_size": holders.block_size,
            "capacity": holders.capacity, "sharding": list(holders.sharding), "cache": holders.contents.to_json(),
        }  # fmt: skip


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    name = f"folder: {path}"
    if folder.is_dir() and not path.exists():
        raise ValueError(f"{name} is missing: folder must be one that save_cache has finished")
    given = read_json(path, name)
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise ValueError(f"{name} must be the manifest of a KV cache, got {shown(given)}")
    if given.get("version") != VERSION:
        raise ValueError(f"{name} must have version {VERSION}, got {shown(given.get('version'))}")
    try:
        sharding = [check_count("sharding", n) for n in check_list("sharding", given.get("sharding"), "4 numbers")]
        if len(sharding) != 4:
            raise ValueError(f"sharding must be tp, kvdp, cp and interleave, got {shown(sharding)}")
        block_size = check_count("block_size", given.get("block_size"), least=1)
        capacity = check_count("capacity", given.get("capacity"), least=1, most=_MAX_CAPACITY)
        check_type("id", given.get("id"), str, "a string")
        contents = CacheContents.from_json(given.get("cache"))
        DecodeSharding(*sharding).check_heads(contents.kv_heads * DecodeSharding(*sharding).ranks, contents.kv_heads)
        return _Manifest(Holders(contents, block_size, capacity, tuple(sharding)), given["id"])
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None
