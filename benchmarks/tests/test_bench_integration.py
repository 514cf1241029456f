"""The benchmark of training through Transformers runs on the CPU, and its two programs compute the same."""

import pytest

pytest.importorskip("transformers")

from benchmarks.integration import QUICK, measure_calls, measure_steps, random_llama, step_memory
from helpers.cases import sweep


@pytest.mark.sweep
def test_steps_and_calls_are_measured():
    sections = dict([*measure_steps(QUICK), *measure_calls(QUICK)])  # asserts equal results
    assert len(sections) == 6
    for rows in sections.values():
        assert all(value > 0 for row in rows for name, value in row.items() if name.endswith(("_ms", "direct_us")))


@pytest.mark.sweep
@pytest.mark.parametrize("batch", ["packed", sweep("padded")])
def test_only_transformers_own_attention_makes_masks_of_pairs(batch):
    model = random_llama(QUICK, 1, head=True)
    assert step_memory(QUICK, model, batch, 2)[1] == 0
    assert step_memory(QUICK, model, batch, None)[1] > 0
