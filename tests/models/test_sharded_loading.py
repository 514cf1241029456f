"""One rank's part of a checkpoint: the same as of the whole model, read slice by slice, complete or refused."""

import ctypes
import gc
import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import attnmesh as am
from helpers.cases import sweep
from helpers.models import attnmesh_model, on_virtual_ranks, tiny_llama, transformers_model, write_folder


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("llama", am.DecodeSharding(tp=2, cp=2)),
        sweep("qwen3_moe", am.DecodeSharding(kvdp=3)),
        sweep("mixtral", am.DecodeSharding(tp=2, cp=2)),
    ],
    ids=str,
)
def test_loaded_parts_are_those_of_the_whole_model(kind, sharding, tmp_path):
    write_folder(tmp_path, transformers_model(kind), max_shard_size="60KB")  # in several files

    def rank(comm):
        expected = am.models.shard_model(attnmesh_model(kind), sharding, comm)
        loaded, tokenizer = am.load_model(tmp_path, sharding=sharding, comm=comm)
        assert tokenizer.decode([3]) == "a"
        assert loaded.generation_config.eos_token_id == expected.generation_config.eos_token_id
        for model in (expected, loaded):
            assert all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        for (name, ours), theirs in zip(loaded.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
        for (name, ours), theirs in zip(loaded.named_buffers(), attnmesh_model(kind).buffers(), strict=True):
            assert torch.equal(ours, theirs), name  # such as frequencies, which are computed
        half = am.load_model(tmp_path, sharding=sharding, comm=comm, dtype=torch.bfloat16)[0]
        assert torch.equal(half.lm_head.weight, expected.lm_head.weight.bfloat16())

    on_virtual_ranks(sharding.ranks, rank)


def test_tied_weights_stay_one_tensor(tmp_path):
    write_folder(tmp_path, tiny_llama(tie_word_embeddings=True))

    def rank(comm):
        model, _ = am.load_model(tmp_path, sharding=am.DecodeSharding(tp=2), comm=comm)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    on_virtual_ranks(2, rank)


class PeakMemory:
    """The largest anonymous memory of this process while it runs, beyond what there was before: not that of files."""

    def __enter__(self):
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed would be used again unseen
        self._before = self.peak = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        self.bytes = self.peak - self._before

    def _watch(self):
        while not self._end.wait(0.0005):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_rank_needs_the_memory_of_its_part_and_one_tensor(tmp_path):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    model = tiny_llama(**sizes, num_hidden_layers=3)
    write_folder(tmp_path, model)
    whole = sum(weight.nbytes for weight in model.parameters())
    largest = max(weight.nbytes for weight in model.parameters())
    del model
    found = {}

    def rank(comm):
        for number in range(comm.world):  # one at a time
            comm.barrier()
            if comm.rank == number:
                found[number] = load(comm)

    def load(comm):
        from attnmesh.models.loading import load_config_and_tokenizer
        from attnmesh.models.sharded import load_sharded

        config, _ = load_config_and_tokenizer(tmp_path)
        with PeakMemory() as memory:
            part = load_sharded(
                tmp_path, config, torch.device("cpu"), torch.float32, am.DecodeSharding(tp=1, kvdp=2, cp=4), comm
            )
        return memory.bytes, sum(weight.nbytes for weight in part.parameters())

    on_virtual_ranks(8, rank)
    assert whole > 80e6
    for peak, held in found.values():
        assert held < whole / 7
        assert peak < held + largest + 2e6
    assert max(peak for peak, _ in found.values()) > whole / 8  # or nothing was seen


# Incomplete checkpoints, on every rank.


def write_tensors(folder, change):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def lose(name):
    return lambda folder: write_tensors(folder, lambda tensors: tensors.pop(name))


def replace(name, tensor):
    return lambda folder: write_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def lose_file(folder):
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def cut_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def set_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose("model.layers.1.mlp.up_proj.weight"), r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        sweep(replace("model.norm.weight", torch.ones(31)), r"'model\.norm\.weight' has the shape \(31,\) instead"),
        sweep(replace("more", torch.ones(3)), "it has 'more', which the model does not"),
        (replace("model.norm.weight", torch.ones(32).int()), "must store floating point weights, got I32"),
        sweep(lose_file, "lacks the weight files model-00002"),
        sweep(cut_file, "is damaged"),
        sweep(set_config(num_hidden_layers=3), "it lacks 'model.layers.2"),
        sweep(
            set_config(model_type="olmo2", architectures=["Olmo2ForCausalLM"]),
            "q_proj.weight: the tensor-parallel plan",
        ),
        sweep(
            set_config(num_attention_heads=2, num_key_value_heads=1, head_dim=16), "q_heads must be at least the number"
        ),
    ],
)
def test_an_incomplete_checkpoint_is_refused_on_all_ranks(change, message, tmp_path):
    broken, good = write_folder(tmp_path / "broken"), write_folder(tmp_path / "good")
    change(broken)

    def rank(comm):
        with pytest.raises(ValueError, match=message):
            am.load_model(broken if comm.rank == 1 else good, sharding=am.DecodeSharding(tp=2, cp=2), comm=comm)

    on_virtual_ranks(4, rank)


def test_arguments_that_do_not_go_together():
    with pytest.raises(am.models.ModelError, match="comm must be None without a sharding"):
        am.load_model("nowhere", comm=am.comm_from())
    with pytest.raises(
        am.models.ModelError, match="attn_implementation must be 'attnmesh' with a sharding, got 'sdpa'"
    ):
        am.load_model("nowhere", sharding=am.DecodeSharding(), attn_implementation="sdpa")
