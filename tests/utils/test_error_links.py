"""The errors that users meet most end with a link to a page and a heading that exist."""

import pickle
import re
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.transformers_models import check_model
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.optional import require
from attnmesh.utils.text import DOCS, explained_in, see, with_link, without_link

ROOT = Path(__file__).parents[2]
SOURCE = Path(am.__file__).parent
LINK = re.compile(r"\. See (?P<page>docs/[\w-]+\.md)#(?P<heading>[\w-]+)$")


def headings(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def heads(q: int, kv: int, length: int = 8, head_dim: int = 16) -> list[torch.Tensor]:
    return [torch.randn(1, n, length, head_dim) for n in (q, kv, kv)]


def over_ranks(call, *, world: int = 2, **options) -> None:
    am.run_virtual(world, lambda comm: call(am.ContextParallel(comm, **options), comm.rank))


def ranks_disagree() -> None:
    over_ranks(lambda cp, rank: cp.attention(*heads(2, 2), mask=am.SlidingWindow(rank + 1)))


def different_operations() -> None:
    def call(cp, rank):
        q, k, v = heads(2, 2)
        return cp.attention(q, k, v) if rank else cp.unshard(q, dim=2, length=16)

    over_ranks(call)


def a_rank_raises() -> None:
    def call(cp, rank):
        if rank == 1:
            raise KeyError("batch")
        cp.comm.barrier()

    results: list[Exception] = []

    def rank(comm):
        try:
            call(am.ContextParallel(comm), comm.rank)
        except am.comm.CommError as error:
            results.append(error)
            raise

    with pytest.raises(KeyError):
        am.run_virtual(2, rank)
    raise results[0]


def ranks_hang() -> None:
    am.run_virtual(2, lambda comm: comm.barrier() if comm.rank == 0 else None)


def a_full_cache() -> None:
    cache = am.BlockCache(
        am.CacheSpec(layers=1, kv_heads=1, head_dim=8, storage="fp32"),
        num_blocks=2,
        block_size=4,
        device="cpu",
        max_sequences=2,
        max_length=64,
    )
    cache.allocate(list(range(20)))


def batch(**tensors) -> None:
    over_ranks(lambda cp, rank: am.shard_inputs(cp, torch.zeros(1, 16, dtype=torch.int64), **tensors))


ERRORS = {
    "ranks disagree": (ranks_disagree, "debugging.md#ranks-disagree"),
    "different operations": (different_operations, "debugging.md#ranks-disagree"),
    "a rank raised": (a_rank_raises, "debugging.md#commerror"),
    "a rank does not arrive": (ranks_hang, "debugging.md#commerror"),
    "a missing extra": (lambda: require("no_such_module", extra="hf"), "features.md#extras"),
    "a full cache": (a_full_cache, "decode.md#a-full-cache"),
    "an unknown backend": (
        lambda: am.attention(*heads(2, 2), backend="flash"),
        "masks.md#attention-on-one-device",
    ),
    "a backend that cannot": (
        lambda: am.attention(*heads(2, 2), softcap=30.0, backend="aten"),
        "masks.md#attention-on-one-device",
    ),
    "an unknown decode backend": (
        lambda: am.decode_attention(torch.randn(1, 2, 1, 16), *heads(2, 2)[1:], backend="flash"),
        "decode.md#backends",
    ),
    "an unknown schedule": (
        lambda: am.ContextParallel(schedule="zigzag"),
        "context-parallelism.md#select-a-schedule",
    ),
    "a schedule that cannot": (
        lambda: over_ranks(
            lambda cp, rank: cp.attention(*heads(4, 4)),
            world=4, schedule="ulysses+ring", layout=am.Striped(), ranks_per_node=2,
        ),
        "context-parallelism.md#select-a-schedule",
    ),
    "a shard of another length": (
        lambda: over_ranks(lambda cp, rank: cp.attention(*heads(2, 2), length=100)),
        "context-parallelism.md#shard-a-sequence",
    ),
    "head counts": (lambda: am.attention(*heads(6, 4)), "masks.md#head-shapes-and-scores"),
    "head_dim": (
        lambda: am.attention(heads(2, 2)[0], *heads(2, 2, head_dim=8)[1:]),
        "masks.md#head-shapes-and-scores",
    ),
    "head counts on one rank": (
        lambda: over_ranks(lambda cp, rank: cp.attention(*heads(4, 4 - rank))),
        "masks.md#head-shapes-and-scores",
    ),
    "a mask tensor": (
        lambda: am.attention(*heads(2, 2), mask=torch.ones(8, 8, dtype=torch.bool)),
        "masks.md#masks-and-scores",
    ),
    "a padding mask of pairs": (
        lambda: batch(attention_mask=torch.ones(1, 1, 16, 16, dtype=torch.bool)),
        "training.md#packed-and-padded-batches",
    ),
    "document lengths": (lambda: batch(document_lengths=[[4, 4]]), "training.md#packed-and-padded-batches"),
    "a sharding of heads": (
        lambda: DecodeSharding(tp=3).check_heads(q_heads=8, kv_heads=4),
        "sharded-generation.md#errors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_ends_with_a_link(name):
    raises, page = ERRORS[name]
    with pytest.raises((ValueError, am.comm.CommError, am.decode.CacheFull, ModuleNotFoundError)) as caught:
        raises()
    message = str(caught.value)
    link = LINK.search(message)
    assert link is not None, message
    assert link[0] == see(page)
    assert message.count(DOCS) == 1


def test_a_model_that_is_not_served_is_explained():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = transformers.LlamaForCausalLM(config)  # with another attn_implementation
    with pytest.raises(ValueError, match="attn_implementation") as caught:
        check_model(model)
    assert str(caught.value).endswith(see("language-models.md#which-models"))


def test_every_link_in_the_source_leads_to_a_heading():
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    links = set(re.findall(r"""["']([a-z-]+\.md)#([a-z0-9-]+)["']""", text))
    assert {f"{page}#{heading}" for page, heading in links} >= {page for _, page in ERRORS.values()}
    assert [f"{page}#{heading}" for page, heading in links if heading not in headings(DOCS + page)] == []


def test_a_message_has_one_link_the_one_it_quotes():
    inner = "k is wrong" + see("masks.md#masks-and-scores")
    assert with_link(f"rank 1 failed: {inner} [rank 0 waited]", "debugging.md#commerror") == (
        "rank 1 failed: k is wrong [rank 0 waited]. See docs/masks.md#masks-and-scores"
    )
    assert with_link(inner, "debugging.md#commerror") == inner
    assert with_link("no link") == "no link"
    assert with_link("ends.", "debugging.md#commerror") == "ends. See docs/debugging.md#commerror"
    assert without_link(inner) == "k is wrong"


def test_a_comm_error_keeps_its_causes_and_survives_pickling():
    error = am.comm.CommError("rank 1 is dead [rank 0 was in barrier]", ["rank 1 is dead"])
    again = pickle.loads(pickle.dumps(am.comm.CommError(str(error))))
    assert str(again) == str(error) == "rank 1 is dead [rank 0 was in barrier]" + see("debugging.md#commerror")
    assert error.causes == ("rank 1 is dead",)
    assert again.causes == ("rank 1 is dead [rank 0 was in barrier]",)


def test_other_errors_pass_a_check_as_they_are():
    @explained_in("masks.md#masks-and-scores")
    def check(error: Exception) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        check(KeyError("x"))
    assert caught.value.args == ("x",)
