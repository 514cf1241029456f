"""Positions past a cache and table entries outside a pool: never followed, and named in the error.

On the CPU they are looked for before a call. On a GPU the kernels find them: the sequence's rows become NaN, and word
is left in memory of the host, which later calls (or `check_decode_errors`) turn into the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import values_of

MAX_SEQUENCES = 65536  # whose faults there is room to report

_records: dict[torch.device, Tensor] = {}


def check_positions(call: DecodeCall) -> None:
    """Raise ValueError for the first fault. Reads the table and the positions: on the CPU, or for a reference."""
    last = call.cur_pos.long()
    for sequence in (last >= call.capacity).nonzero():
        raise ValueError(
            f"cur_pos[{int(sequence)}] is {int(last[sequence])}, but the cache holds positions 0 to {call.capacity - 1}"
        )
    if call.table is None or not call.table.numel():
        return
    first, last = _positions_read(call)
    blocks = values_of(call.k).shape[0]
    slots = torch.arange(call.table.shape[1], device=last.device)
    read = (slots >= first[:, None] // call.block_size) & (slots * call.block_size <= last[:, None])
    wrong = read & ((call.table < 0) | (call.table >= blocks))
    for sequence, slot in wrong.nonzero():
        value = call.table.expand(last.shape[0], -1)[sequence, slot]
        raise ValueError(
            f"block_table[{int(sequence)}, {int(slot)}] is {int(value)}, but the pool has blocks 0 to {blocks - 1}"
        )


def _positions_read(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """The first and the last position that each sequence reads; a last of -1 where it reads nothing."""
    last = call.cur_pos.long()
    if call.key_range is not None:
        first, end = call.key_range[0][:, 0].long().clamp(0), call.key_range[1][:, -1].long()
        last = torch.minimum(last, end - 1)
        return first, torch.where(first <= last, last, -1)
    if call.window is not None:
        return (last - call.q.shape[2] + 2 - call.window).clamp(0), last
    return torch.zeros_like(last), last


def error_record(device: torch.device) -> Tensor:
    """Where kernels on a device leave word of a fault: a flag, then a word for each sequence.

    Pinned memory of the host: kernels can write it, and the host can read it without waiting for them. It is made once
    and never moves, so captured graphs may hold it.
    """
    if device not in _records:
        _records[device] = torch.zeros(1 + MAX_SEQUENCES, dtype=torch.int64, pin_memory=device.type == "cuda")
    return _records[device]


def raise_device_error(device: torch.device) -> None:
    """Raise ValueError if word of a fault has come from a device. Does not wait for it."""
    record = _records.get(device)
    if record is None or not int(record[0]):
        return
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return  # a capture may not wait; a later call reports
        torch.cuda.synchronize(device)  # the flag may come before the words
    told = record[1:].nonzero()
    if not len(told):  # another thread has raised it
        return
    sequence = int(told[0])
    word = int(record[1 + sequence])
    record.zero_()
    if word < 0:
        what = f"cur_pos[{sequence}] is {-1 - word}, past the cache"
    else:
        slot, entry = (word >> 32) - 1, word & 0xFFFFFFFF
        entry -= (entry >> 31) << 32  # it is signed
        what = f"block_table[{sequence}, {slot}] is {entry}, outside the pool"
    raise ValueError(f"{what} (of an earlier decode call on {device}, whose out and lse are NaN there)")


def check_decode_errors() -> None:
    """Wait for the GPUs and raise ValueError if a decode call met a fault: the sequence, the slot and the value.

    A fault is reported once. Later decode calls report it, too, but do not wait: this is for the end of a run.
    """
    for device in list(_records):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        raise_device_error(device)
