"""Backend on the library's MLA decode kernels for Hopper, written in Gluon. Splits are merged by a Triton kernel."""

from __future__ import annotations

from types import ModuleType

from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.triton import DecodeTiles, Launches, Triton, rope_of
from attnmesh.ops.launch import gpu_of
from attnmesh.utils.optional import require

_FEW_ROWS, _FEW_ROWS_FP8 = 16, 32
_MANY_ROWS = range(64, 129)  # that `gluon_grouped` reads each key once for; measured with 64


class Gluon(Triton):
    """Backend for paged MLA: keys of 576 columns, of which the first 512 are the values.

    `gluon_narrow` serves few rows (query heads and tokens of a KV head), `gluon_fp8` few rows over latents in 8 bits,
    `gluon_latent` others.
    """

    name = "gluon"
    _checks = "common"  # the module that knows what the kernels take

    def why_not(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        if not call.q.is_cuda or gpu_of(call.q.device).capability != 90:
            return "its kernels need a Hopper GPU (compute capability 9.0)"
        if call.softcap is not None:
            return "its kernels take no softcap"
        reason = super().why_not(call)
        if reason is None:
            reason = _module(self._checks).why_not(call)
        return reason

    def launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> Launches:
        """Launches the kernels for up to 1024 sequences."""
        rows = call.group * call.q.shape[2]
        few, kind = (_FEW_ROWS, "narrow") if rope_of(call.k) is None else (_FEW_ROWS_FP8, "fp8")
        return _launched(kind if rows <= few else "latent", call, state, first_sequence)


class GluonGQA(Gluon):
    """Backend for paged GQA with many rows (query heads and tokens) per KV head, on `gluon_grouped`."""

    name = "gluon_gqa"
    _checks = "grouped"

    def is_faster(self, call: DecodeCall) -> bool:
        """Whether a call that it can serve is faster than on Triton, which reads a key once for every 32 rows.

        Not by the number or the lengths of sequences: results with a `split_size` must not depend on the batch.
        """
        return call.q.shape[3] == 128 and call.group * call.q.shape[2] in _MANY_ROWS

    def launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> Launches:
        """Launches the kernels for up to 1024 sequences."""
        return _launched("grouped", call, state, first_sequence)


def _launched(kind: str, call: DecodeCall, state: State, first_sequence: int) -> Launches:
    launches: Launches = _module(kind).launch(call, state, first_sequence)
    return launches


def _module(name: str) -> ModuleType:
    return require(f"attnmesh.ops.decode.gluon_{name}", extra="triton")
