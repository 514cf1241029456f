"""The masks that are compared with FlexAttention are the same on both sides."""

import pytest
import torch

from benchmarks.masks import Case, cases

LENGTH = 16384


@pytest.mark.parametrize("case", cases(LENGTH), ids=lambda case: case.name)
def test_masks_equal_their_mask_mods(case: Case):
    near = torch.arange(4090, 4110)  # the edges of blocks, documents and windows
    at = torch.cat([torch.arange(6), near, near + 4096, torch.arange(0, LENGTH, 509)])
    q, k = at[:, None], at
    assert torch.equal(case.mask.visible(q, k), case.mask_mod(0, 0, q, k))
