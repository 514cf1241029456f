"""Positions past a cache and table entries outside a pool: found before anything is read, named in the error."""

from __future__ import annotations

import torch

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import values_of


def check_now(call: DecodeCall) -> None:
    """Raise ValueError for the first fault. Reads the table and the positions: on the CPU, or for a reference."""
    last = call.cur_pos.long()
    for sequence in (last >= call.capacity).nonzero():
        raise ValueError(position_fault(int(sequence), int(last[sequence]), call.capacity))
    if call.table is None or not call.table.numel():
        return
    tokens, blocks = call.q.shape[2], values_of(call.k).shape[0]
    first = torch.zeros_like(last) if call.window is None else (last - tokens + 2 - call.window).clamp(0)
    slots = torch.arange(call.table.shape[1], device=last.device)
    read = (slots >= first[:, None] // call.block_len) & (slots * call.block_len <= last[:, None])
    wrong = read & ((call.table < 0) | (call.table >= blocks))
    for sequence, slot in wrong.nonzero():
        value = call.table.expand(last.shape[0], -1)[sequence, slot]
        raise ValueError(table_fault(int(sequence), int(slot), int(value), blocks))


def table_fault(sequence: int, slot: int, value: int, blocks: int) -> str:
    """What is wrong with a table entry that a sequence reads."""
    return f"block_table[{sequence}, {slot}] is {value}, but the pool has blocks 0 to {blocks - 1}"


def position_fault(sequence: int, value: int, capacity: int) -> str:
    """What is wrong with a position past the cache."""
    return f"cur_pos[{sequence}] is {value}, but the cache holds positions 0 to {capacity - 1}"
