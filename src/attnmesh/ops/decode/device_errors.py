"""Invalid positions and block table entries: never dereferenced, and reported with sequence, slot and value.

On the CPU they are checked before a call. On a GPU the kernels detect them: the rows of the sequence become NaN, and a
record in host memory is raised as an error by a later decode call or by `check_decode_errors`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import values_of

MAX_SEQUENCES = 65536  # that the record has space for
INDEX_FAULT = 1 << 62  # marks the word of an index outside the cache

_records: dict[torch.device, Tensor] = {}
_flags: dict[torch.device, ctypes.c_int64] = {}  # the first word of each record, read in a tenth of a microsecond


def check_positions(call: DecodeCall) -> None:
    """Raises ValueError for the first invalid position or block. Reads the table: for the CPU and the reference."""
    last = call.cur_pos.long()
    for sequence in (last >= call.capacity).nonzero():
        raise ValueError(f"cur_pos[{int(sequence)}] is {int(last[sequence])}, but must be 0 to {call.capacity - 1}")
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
    """The first and the last position that each sequence reads; the last is -1 if it reads nothing."""
    last = call.cur_pos.long()
    if call.key_range is not None:
        first, end = call.key_range[0][:, 0].long().clamp(0), call.key_range[1][:, -1].long()
        last = torch.minimum(last, end - 1)
        return first, torch.where(first <= last, last, -1)
    if call.window is not None:
        return (last - call.q.shape[2] + 2 - call.window).clamp(0), last
    return torch.zeros_like(last), last


def error_record(device: torch.device) -> Tensor:
    """The record that kernels on a device write errors to: a flag, then one word per sequence.

    It is in pinned host memory: kernels can write it, and the host can read it without synchronizing. It is allocated
    once and never moves, so captured graphs may refer to it.
    """
    if device not in _records:
        record = torch.zeros(1 + MAX_SEQUENCES, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        record = _records.setdefault(device, record)  # another thread may have been first
        _flags[device] = ctypes.c_int64.from_address(record.data_ptr())
    return _records[device]


def raise_device_error(device: torch.device) -> None:
    """Raises ValueError if a kernel on the device has recorded an error. Does not wait for running kernels."""
    flag = _flags.get(device)
    if flag is None or not flag.value:
        return
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return  # a capture may not synchronize; a later call reports
        torch.cuda.synchronize(device)  # the flag may become visible before the words
    record = _records[device]
    reported = record[1:].nonzero()
    if not len(reported):  # another thread has raised it
        return
    sequence = int(reported[0])
    word = int(record[1 + sequence])
    record.zero_()
    if word < 0:
        what = f"cur_pos[{sequence}] is {-1 - word}, beyond the cache"
    elif word & INDEX_FAULT:
        what = f"indices[{sequence}] contain {word - INDEX_FAULT}, beyond the cache"
    else:
        slot, entry = (word >> 32) - 1, word & 0xFFFFFFFF
        entry -= (entry >> 31) << 32  # sign extension
        what = f"block_table[{sequence}, {slot}] is {entry}, outside the pool"
    raise ValueError(f"{what} (in an earlier decode call on {device}, whose out and lse are NaN for that sequence)")


def check_decode_errors() -> None:
    """Synchronizes the GPUs and raises ValueError if a decode call has read an invalid position or block.

    The error names the sequence, the slot and the value, and is raised once. Later decode calls raise it too, but
    without synchronizing: call this at the end of a run.

    Examples:
        >>> pool, table = torch.randn(4, 16, 2, 64), torch.tensor([[7]], dtype=torch.int32)
        >>> try:  # on a CPU the call itself raises, on a GPU check_decode_errors() does
        ...     am.paged_decode_attention(torch.randn(1, 2, 1, 64), pool, pool, table, cur_pos=[0])
        ...     am.decode.check_decode_errors()
        ... except ValueError as error:
        ...     print(error)
        block_table[0, 0] is 7, but the pool has blocks 0 to 3
    """
    for device in list(_records):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        raise_device_error(device)
