"""Some of a comm's ranks that go their own way."""

from __future__ import annotations

from collections.abc import Mapping

from attnmesh.comm.agreement import Claim
from attnmesh.comm.sub import SubComm


class ApartComm(SubComm):
    """A part of a world whose calls differ from those of the other parts.

    There is nobody to compare them with: whoever makes such a part has agreed with the whole world on everything that
    the calls follow from.
    """

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        return {self.rank: claim}
