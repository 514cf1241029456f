"""DeepSpeed with context parallelism is refused on every rank, before an engine is made."""

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

from attnmesh.training import accelerate as integration
from helpers.training import accelerate_ranks, run_ranks


def message_of_a_refusal(comm, stage):
    import deepspeed.comm.torch
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin

    deepspeed.comm.torch.build_shm_op = lambda: None  # a faster all-reduce, which takes minutes to compile
    integration.enable()
    with accelerate_ranks(comm.world):
        plugin, config = DeepSpeedPlugin(zero_stage=stage), ParallelismConfig(cp_size=2)
        with pytest.raises(ValueError, match="deepspeed_plugin must be None") as refused:
            Accelerator(deepspeed_plugin=plugin, parallelism_config=config)
    return str(refused.value)


def test_zero_with_context_parallelism_is_refused():
    messages = run_ranks(2, message_of_a_refusal, 3, imports=("deepspeed", "accelerate"))
    assert all("cp_size 2 and DeepSpeed" in message and "FSDP2" in message for message in messages)
