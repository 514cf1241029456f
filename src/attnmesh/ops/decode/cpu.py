"""Decode on the CPU."""

from __future__ import annotations

from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.state import State


class Cpu:
    """Backend on torch's CPU kernels."""

    name = "cpu"

    def refusal(self, call: DecodeCall) -> str | None:
        """Why it cannot serve this call; None if it can."""
        return None if call.q.device.type == "cpu" else f"it computes on the CPU, q is on {call.q.device}"

    def run(self, call: DecodeCall) -> State:
        """Out and lse."""
        return reference.run(call)
