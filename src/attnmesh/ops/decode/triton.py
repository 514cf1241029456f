"""Decode in Triton."""

from __future__ import annotations

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.state import State


class Triton:
    """Backend over the split kernel and the merge kernel."""

    name = "triton"

    def refusal(self, call: DecodeCall) -> str | None:
        """Why it cannot serve this call; None if it can."""
        return "not yet"

    def run(self, call: DecodeCall) -> State:
        """Out and lse."""
        raise NotImplementedError
