"""`ContextParallel` over virtual ranks: schedules, layouts, masks, odd lengths, keys of another length; backward."""

from __future__ import annotations

from functools import partial
from random import Random

import attnmesh as am
from attnmesh.plan.shards import SCHEDULES
from attnmesh.testing.attention import virtual_results

from .cases import Case, chance, draw_length, pick
from .dense import assert_attention, draw_gradients, make_inputs, references, score_terms
from .masks import draw_mask, make_mask

DIMS = {(128, 128): 6, (64, 64): 6, (64, 32): 1, (33, 17): 1}
HEADS = {(8, 2): 4, (4, 4): 2, (8, 8): 2, (6, 2): 1, (3, 1): 1}
LAYOUTS = {"zigzag": 4, "contiguous": 2, "striped": 2, "zigzag2": 1, "balanced": 2, "joint": 1}
BACKENDS = {"cuda": {"auto": 5, "triton": 3, "gluon": 2, "aten": 2}, "cpu": {"auto": 3, "aten": 2, "torch": 1}}


def draw(random: Random, build: Random, device: str) -> Case:
    length = draw_length(random, 4000 if device == "cuda" else 200)
    keys = length if chance(random, 0.8) else draw_length(random, 3000 if device == "cuda" else 150)
    schedule, batch = pick(random, {"auto": 2} | dict.fromkeys(SCHEDULES, 2)), pick(random, {1: 3, 2: 1})
    world = random.choice((4, 6, 8)) if "+" in schedule else random.randint(2, 8)
    nodes = [n for n in range(2, world) if world % n == 0] if "+" in schedule else [1]
    crossed = random.choice(("full", "causal", "window(40,7)", "prefix(9)"))
    case: Case = {
        "mask": draw_mask(random, length, batch) if keys == length else crossed, "q": length, "k": keys,
        "batch": batch, "heads": pick(build, HEADS), "dims": pick(build, DIMS),
        "dtype": pick(build, {"bf16": 5, "fp16": 1, "fp32": 2}), "backend": pick(build, BACKENDS[device]),
        "world": world, "nodes": random.choice(nodes), "schedule": schedule,
        "layout": pick(random, LAYOUTS),
    }  # fmt: skip
    if keys != length:
        own = case["layout"] in ("joint", "balanced")  # made for the queries' length
        case["key_layout"] = pick(random, {None: 0 if own else 1, "contiguous": 1, "striped": 1})
    case |= {name: chance(build, odds) for name, odds in {"softcap": 0.1, "sinks": 0.15, "alibi": 0.1}.items()}
    return case | {"grad": draw_gradients(random, case["backend"]), "seed": random.randrange(10**6)}


def check(case: Case, device: str) -> None:
    mask = make_mask(case["mask"], case["seed"], case["k"], case["batch"])
    inputs, options = make_inputs(case, device), score_terms(case, device)
    key_layout = case.get("key_layout")
    actual = virtual_results(
        case["world"], inputs, mask, _layout(case["layout"], mask, case["q"]),
        key_layout=key_layout and _layout(key_layout, mask, case["k"]), schedule=case["schedule"],
        backend=case["backend"], ranks_per_node=case["world"] // case["nodes"], **options,
    )  # fmt: skip
    run = partial(references, inputs, mask, **{"sinks": None, **options})
    assert_attention(actual, run(plain=True), run(), inputs)


def _layout(name: str, mask: am.Mask, length: int) -> am.Layout:
    if name == "balanced":
        return am.Balanced(mask)
    if name == "joint":
        return am.Joint((length // 3, am.Contiguous()), (length - length // 3, am.Zigzag()))
    layouts = {"zigzag": am.Zigzag(), "zigzag2": am.Zigzag(2), "contiguous": am.Contiguous(), "striped": am.Striped()}
    return layouts[name]
