"""Requests that continue in another `Generator`: `move_requests` to other ranks, `save_requests` and `load_requests`.

A request is its prompt, its options and the tokens of its answer: random numbers depend on the seed, the sample and the
number of a token only. Its keys and values move with it, bit by bit (`reshard`), and its recurrent states; the target
computes what is not in a cache yet. The tokens are the same that the first generator would have computed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.generation.agreement import config_digest, digest
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import Request
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.api import broadcast_text, reshard
from attnmesh.parallel.reshard.files import load_cache, save_cache
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.files import check_file, read_json
from attnmesh.utils.validation import check_list, check_path, check_type, shown

_FILE = "requests.json"
State = dict[str, Any]
"""A request as JSON, and the row of its sequence in the cache, -1 if it has none there."""


def move_requests(
    source: Generator | None,
    target: Generator | None,
    comm: Comm | None = None,
    *,
    requests: Sequence[Request] | None = None,
) -> list[Request]:
    """Let requests of one generator continue in another generator, on other ranks or with another sharding.

    All ranks of `comm` must call it, with the generators that they belong to, and None for the other. The ranks of the
    source may name the `requests`, such as those whose prompts are computed; by default all move. Returns the requests
    of the target in this order, by default the order of their submission; none on other ranks. The requests of the
    source end with `finish_reason` "moved"; others continue. Keys, values and states are sent as they are stored;
    requests that wait, and beam searches, begin again. Both generators must have the same model and storage, without
    blocks of their own for windows. Raises CacheFull on every rank if the target has no room: the source then
    continues.

    Examples:
        >>> def rank(comm):
        ...     by_position, by_sequence = (
        ...         am.Generator(model, comm=comm, cache_tokens=64, max_sequences=2, sharding=sharding)
        ...         for sharding in (am.DecodeSharding(cp=2), am.DecodeSharding(kvdp=2)))
        ...     by_position.submit([1, 2, 3], max_new_tokens=4, stop=[])
        ...     by_position.step()
        ...     (request,) = am.generation.move_requests(by_position, by_sequence, comm)
        ...     return [token.id for token in by_sequence.stream(request)]
        >>> alone = [token.id for token in am.generate(model, None, [[1, 2, 3]], max_new_tokens=4, stop=[])]
        >>> am.run_virtual(2, rank) == [alone, alone]
        True
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[Generator, list[Request] | None], SharedValues]:
        for name, generator in (("source", source), ("target", target)):
            check_type(name, generator, (Generator, type(None)), "a Generator or None")
        own = source or target
        if requests is not None and source is None:
            raise ValueError(f"requests must be None on ranks without their source, got {shown(requests)}")
        if own is None or source is target:
            raise ValueError(f"source and target must be two Generators, or one and None, got {source} and {target}")
        if source is not None and target is not None and config_digest(source.model) != config_digest(target.model):
            raise ValueError("target must have a model of the configuration that the source has, got another one")
        chosen = None if requests is None else check_list("requests", requests, "requests")
        if not all(isinstance(each, Request) for each in chosen or ()):
            raise ValueError(f"requests must be what submit() of the source returned, got {shown(requests)}")
        return (own, chosen), {"config": config_digest(own.model), "states": own.engine.states.num_bytes}

    own, chosen = check_on_all_ranks(comm, "move_requests", check_arguments, force=True)
    device = own.engine.device
    to = [-1, 0, 0, 0, 0] if target is None else [target.comm.rank, *astuple(target.sharding)]
    header = torch.tensor([source is not None, *to], dtype=torch.int64, device=device)
    headers = [each.tolist() for each in comm.all_gather(header, [(6,)] * comm.world)]

    def check_ranks() -> tuple[tuple[DecodeSharding, list[int]], SharedValues]:
        shardings = {tuple(each[2:]) for each in headers if each[1] >= 0}
        if not any(each[0] for each in headers) or len(shardings) != 1:
            sources = sum(bool(each[0]) for each in headers)
            raise ValueError(
                f"source must be given on some ranks, got it on {sources}, and one target on others, got "
                f"{len(shardings)} different targets (on this rank source={shown(source)} and target={shown(target)})"
            )
        sharding = DecodeSharding(*shardings.pop())
        places = {each[1]: rank for rank, each in enumerate(headers) if each[1] >= 0}
        if sorted(places) != list(range(sharding.ranks)):
            given = sorted(places)
            raise ValueError(f"target must be given on each of its {sharding.ranks} ranks once, got its ranks {given}")
        return (sharding, [places[place] for place in range(sharding.ranks)]), {}

    sharding, ranks = check_on_all_ranks(comm, "move_requests ranks", check_ranks, force=True)

    def begin() -> tuple[list[State], SharedValues]:
        if target is not None:
            target.check_adopts()
        return [] if source is None else source.states(chosen), {}

    states = check_on_all_ranks(comm, "move_requests states", begin, force=True)
    _check_in_step(comm, source, target, states, device)
    having = [rank for rank, each in enumerate(headers) if each[0]]
    text = broadcast_text(comm, None if source is None else json.dumps(states).encode, having, device)
    states = states if source is not None else json.loads(text)
    moved = _checked(comm, "move_requests", states, target)
    joined: dict[int, CacheSequence] = {}
    rows = [state["row"] for state in states if state["row"] >= 0]
    if rows:
        cache, into = (None if each is None else each.engine.cache for each in (source, target))
        made = reshard(cache, sharding, comm, ranks=ranks, rows=None if source is None else rows, into=into)
        joined = made if isinstance(made, dict) else {}
        if own.engine.calls.recurrent:
            with propagate_failure(comm):
                _move_states(comm, source, target, joined, rows)
    if source is not None:
        source.end_moved(chosen)
    if target is not None:
        target.adopt(moved, [joined.get(state["row"]) for state in states])
    return moved


def save_requests(generator: Generator, folder: str | Path) -> None:
    """Write all requests of a generator with their keys and values to a folder, which must be empty or not exist.

    All ranks of the generator must call it. Requests also continue here; beam searches begin again. The folder has the
    files of `save_cache`, `requests.json`, and of a model with recurrent layers the states of every sequence.

    Examples:
        >>> import tempfile
        >>> first, second = (am.Generator(model, cache_tokens=64) for _ in range(2))
        >>> request = first.submit([1, 2, 3], max_new_tokens=4, stop=[])
        >>> tokens = first.step()
        >>> folder = tempfile.mkdtemp()
        >>> am.generation.save_requests(first, folder)
        >>> (again,) = am.generation.load_requests(second, folder)
        >>> [token.id for token in second.stream(again)] == [token.id for token in first.stream(request)]
        True
    """
    check_type("generator", generator, Generator)
    comm, path = generator.comm, check_path("folder", folder)
    states = check_on_all_ranks(comm, "save_requests", lambda: (generator.states(), {}), force=True)
    save_cache(generator.engine.cache, path, comm)

    def write() -> tuple[None, SharedValues]:
        if comm.rank == 0:
            try:
                model, text = config_digest(generator.model), json.dumps(states)
                (path / _FILE).write_text(json.dumps({"model": model, "digest": digest(text), "requests": states}))
            except OSError as error:
                raise ValueError(f"folder: {path / _FILE} cannot be written: {error.strerror or error}") from None
        return None, {}

    def write_states() -> tuple[None, SharedValues]:
        _write_states(generator, path, states)
        return None, {}

    check_on_all_ranks(comm, "save_requests states", write_states, force=True)
    check_on_all_ranks(comm, "save_requests file", write, force=True)


def load_requests(generator: Generator, folder: str | Path) -> list[Request]:
    """The requests that `save_requests` wrote, which a generator continues, on any number of ranks.

    All its ranks must call it and see the folder. The model must be the same: its configuration is compared, its
    weights are not. Files that are missing or damaged raise ValueError on every rank, and CacheFull is raised if there
    is no room.

    Examples:
        >>> import tempfile
        >>> first, folder = am.Generator(model, cache_tokens=64), tempfile.mkdtemp()
        >>> request = first.submit([1, 2, 3], max_new_tokens=4, stop=[])
        >>> am.generation.save_requests(first, folder)
        >>> def rank(comm):  # more ranks than it was written by
        ...     generator = am.Generator(model, comm=comm, cache_tokens=64)
        ...     (again,) = am.generation.load_requests(generator, folder)
        ...     return [token.id for token in generator.stream(again)]
        >>> am.run_virtual(2, rank)[1] == [token.id for token in first.stream(request)]
        True
    """
    check_type("generator", generator, Generator)
    comm, engine, path = generator.comm, generator.engine, check_path("folder", folder)

    def read() -> tuple[list[State], SharedValues]:
        generator.check_adopts()
        given = read_json(path / _FILE, f"folder: {path / _FILE}")
        values = given if isinstance(given, dict) else {}
        if "model" not in values or values.get("digest") != digest(json.dumps(values.get("requests"))):
            raise ValueError(f"folder: {path / _FILE} must be what save_requests wrote, got {shown(given)}")
        if values["model"] != config_digest(generator.model):
            raise ValueError("generator must have a model of the configuration that the requests have, got another one")
        return values["requests"], {"requests": values["digest"]}

    states = check_on_all_ranks(comm, "load_requests", read, force=True)
    requests = _checked(comm, "load_requests", states, generator)
    of_layers = check_on_all_ranks(
        comm, "load_requests states", lambda: (_read_states(generator, path, states), {}), force=True
    )
    cache = load_cache(path, generator.sharding, comm, device=engine.device)
    assert cache is not None
    cached = {row: list(each.ids[: each.length]) for row, each in cache.sequences.items()}
    of_rows = {state["row"]: each.known for state, each in zip(states, requests, strict=True) if state["row"] >= 0}
    if set(cached) != set(of_rows) or any(ids != of_rows[row][: len(ids)] for row, ids in cached.items()):
        raise ValueError(f"folder: the cache and {_FILE} must be of one call of save_requests, got sequences of others")
    joined = reshard(cache, generator.sharding, comm, into=engine.cache) if cache.sequences else {}
    assert isinstance(joined, dict)
    for row, sequence in joined.items():
        if row in of_layers and engine.states.has(sequence):
            engine.states.unpack(sequence, of_layers[row].to(engine.device))
    generator.adopt(requests, [joined.get(state["row"]) for state in states])
    return requests


def _move_states(
    comm: Comm, source: Generator | None, target: Generator | None, joined: dict[int, CacheSequence], rows: list[int]
) -> None:
    """Send the recurrent states of sequences from the first rank that has them to the ranks that continue these."""
    at = {} if source is None else source.engine.cache.sequences
    has = [source is not None and source.engine.states.has(at[row]) for row in rows]
    needs = [target is not None and target.engine.states.has(joined.get(row)) for row in rows]
    device = next(each.engine.device for each in (source, target) if each is not None)
    own = torch.tensor([has, needs], dtype=torch.uint8, device=device)
    by_rank = [each.tolist() for each in comm.all_gather(own, [(2, len(rows))] * comm.world)]
    for i, row in enumerate(rows):
        root = next(rank for rank, (having, _) in enumerate(by_rank) if having[i])
        receivers = [rank for rank, (having, needing) in enumerate(by_rank) if needing[i] and not having[i]]
        packed = None
        if source is not None and has[i] and (needs[i] or comm.rank == root):
            packed = source.engine.states.packed(at[row])
        if comm.rank == root and receivers:
            assert packed is not None
            comm.exchange([(packed, rank) for rank in receivers], []).wait()
        if target is not None and needs[i]:
            if packed is None:
                size = (target.engine.states.num_bytes,)
                packed = comm.buffer(size, dtype=torch.uint8, device=target.engine.device)
                comm.exchange([], [(packed, root)]).wait()
            target.engine.states.unpack(joined[row], packed)


def _states_file(folder: Path, row: int) -> Path:
    return folder / f"states-{row:05d}.bin"


def _write_states(generator: Generator, folder: Path, states: list[State]) -> None:
    """Write the recurrent states of the sequences of this rank, each behind its CRC-32."""
    engine, place = generator.engine, generator.sharding.place(generator.comm.rank)
    if not engine.calls.recurrent or place.cp or place.tp:
        return
    sequences = engine.cache.sequences
    for row in (state["row"] for state in states):
        if row >= 0 and sequences[row].kvdp_rank == place.kvdp:
            data, path = engine.states.packed(sequences[row]).cpu().numpy().tobytes(), _states_file(folder, row)
            try:
                path.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
            except OSError as error:
                raise ValueError(f"folder: {path} cannot be written: {error.strerror or error}") from None


def _read_states(generator: Generator, folder: Path, states: list[State]) -> dict[int, Tensor]:
    """The recurrent states of each sequence, by row; raises ValueError if a file is missing or damaged."""
    if not generator.engine.calls.recurrent:
        return {}
    found, size = {}, generator.engine.states.num_bytes
    for row in (state["row"] for state in states):
        if row < 0:
            continue
        path = _states_file(folder, row)
        check_file(path, f"folder: {path}", most=4 + size)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"folder: {path} cannot be read: {error.strerror or error}") from None
        if len(data) != 4 + size or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            raise ValueError(f"folder: {path} is damaged: it must have {size} bytes of states and their checksum")
        found[row] = torch.frombuffer(bytearray(data[4:]), dtype=torch.uint8)
    return found


def _check_in_step(
    comm: Comm, source: Generator | None, target: Generator | None, states: list[State], device: torch.device
) -> None:
    """Raise ValueError on every rank unless each generator and the requests that it moves are equal on its ranks."""
    progress = None if source is None else (source.progress, states), None if target is None else target.progress
    own = [-1 if each is None else int(digest(each), 16) >> 1 for each in progress]
    numbers = comm.all_gather(torch.tensor(own, dtype=torch.int64, device=device), [(2,)] * comm.world)
    for name, by_rank in zip(("source", "target"), torch.stack(list(numbers), 1).tolist(), strict=True):
        if len({each for each in by_rank if each >= 0}) > 1:
            raise ValueError(f"{name} must be the same, after the same calls, on all its ranks, got different ones")


def _checked(comm: Comm, operation: str, states: list[State], target: Generator | None) -> list[Request]:
    """The requests of the target; all ranks raise ValueError if the target cannot take a request."""

    def check() -> tuple[list[Request], SharedValues]:
        try:
            return [] if target is None else target.requests_from(states), {}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"requests must be what a Generator wrote, got {type(error).__name__}: {error}") from None

    return check_on_all_ranks(comm, operation + " requests", check, force=True)
