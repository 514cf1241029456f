"""`save_cache` and `load_cache`: a KV cache as files, one per rank, that any number of ranks can load.

A folder has `manifest.json`, which is written last, and a `CacheFile` for every rank that holds something no earlier
rank holds.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.api import Source, share_holders, source_of
from attnmesh.parallel.reshard.cache_file import FORMAT, MANIFEST, VERSION, CacheFile
from attnmesh.parallel.reshard.contents import CacheContents
from attnmesh.parallel.reshard.goal import Goal, Holders, Target, device_of, target_ranks
from attnmesh.parallel.reshard.tokens import CacheTokens
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Part, plan_moves
from attnmesh.utils.files import read_json
from attnmesh.utils.validation import check_count, check_list, check_path, check_type, shown

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
        >>> am.save_cache(cache, folder)
        >>> am.load_cache(folder, am.DecodeSharding()).sequences[0].length
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
    """The cache that `save_cache` wrote, sharded as `to`, on any number of ranks; the arguments are those of `reshard`.

    All ranks of `comm` must call it and see the folder. A rank reads the chunks that have tokens it needs. Files that
    are missing, damaged, or of another cache raise ValueError on every rank.

    Examples:
        >>> import tempfile
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16)
        >>> sizes = dict(batch=1, num_blocks=4, block_size=4, max_length=16, device="cpu")
        >>> cache = am.ShardedCache(am.DecodeSharding(), 0, spec, **sizes)
        >>> cache.mark_written(cache.append([cache.allocate([7, 8, 9])], 3))
        >>> folder = tempfile.mkdtemp()
        >>> am.save_cache(cache, folder)
        >>> def rank(comm):  # more ranks than it was written by
        ...     return am.load_cache(folder, am.DecodeSharding(cp=2), comm).local.cur_pos.tolist()
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
        # The ranks of the files are not those of the comm: this rank comes after them.
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
