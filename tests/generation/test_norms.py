"""RMS norms in one call, where that has the bits of the module's own code."""

import copy
import threading
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnmesh.generation.layers import one_call, run_in_one_call, use_one_call


def test_an_rms_norm_takes_one_call_only_where_that_has_its_bits(monkeypatch):
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    norms = nn.ModuleDict({"plain": LlamaRMSNorm(48), "scaled": ScaledRMSNorm(48), "narrow": LlamaRMSNorm(48).half()})
    for norm in norms.values():
        nn.init.normal_(norm.weight)
    use_one_call(norms)
    assert [name for name, norm in norms.items() if "forward" in vars(norm)] == ["plain", "narrow"]
    calls = Mock(wraps=F.rms_norm)
    monkeypatch.setattr(F, "rms_norm", calls)
    x = torch.randn(2, 3, 48)
    assert torch.equal(norms["plain"](x), LlamaRMSNorm.forward(norms["plain"], x))
    assert not calls.called  # the model's own passes are as they were
    with one_call():
        assert torch.equal(norms["plain"](x), LlamaRMSNorm.forward(norms["plain"], x))
        assert calls.call_count == 1
        assert torch.equal(norms["narrow"](x.half()), LlamaRMSNorm.forward(norms["narrow"], x.half()))
        assert calls.call_count == 1
    copied = copy.deepcopy(norms["plain"])
    nn.init.zeros_(copied.weight)
    assert not copied(x).any()
    assert norms["plain"](x).any()
    norms.bfloat16()
    assert norms["plain"](x.bfloat16()).dtype == torch.bfloat16


def test_an_rms_norm_with_code_or_hooks_of_its_own_is_as_it_was():
    class WideRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):  # in float32, whatever the dtype of the model
            return LlamaRMSNorm.forward(self, hidden_states.float())

    class Watcher:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), []  # cannot be copied

        def watch(self, module, args, out):
            self.seen.append(out)

    watcher, watched, wide = Watcher(), LlamaRMSNorm(48), WideRMSNorm(48)
    watched.register_forward_hook(watcher.watch)
    wide.weight.data = wide.weight.data.half()
    use_one_call(nn.ModuleList([watched, wide]))
    assert "forward" in vars(watched)
    assert "forward" not in vars(wide)
    assert not watcher.seen  # nothing that the model has computed
    x = torch.randn(2, 48)
    with one_call():
        assert torch.equal(watched(x), watcher.seen[0])
        assert len(watcher.seen) == 1


def test_an_rms_norm_under_autocast_has_the_dtype_of_the_model(monkeypatch):
    norm = LlamaRMSNorm(48)
    use_one_call(norm)
    monkeypatch.setattr(F, "rms_norm", Mock())  # float32 on a GPU
    with one_call(), torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(2, 48)).dtype == torch.float32
    assert not F.rms_norm.called


@pytest.mark.sweep
def test_a_model_can_be_compiled_as_one_graph_once_an_engine_has_it():
    norm, x = LlamaRMSNorm(48), torch.randn(2, 48)
    expected = norm(x)
    use_one_call(norm)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    with one_call():
        assert torch.equal(compiled(x), expected)


def test_a_pass_that_is_interrupted_leaves_nothing_behind():
    norm, x = LlamaRMSNorm(48), torch.randn(2, 48)
    use_one_call(norm)

    def interrupted() -> None:
        one_call().__enter__()  # as if the end never came
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_one_call(interrupted)
    with patch.object(F, "rms_norm", Mock(wraps=F.rms_norm)) as calls:
        norm(x)
        assert not calls.called
        run_in_one_call(norm, x)
        assert calls.call_count == 1
