"""axolotl's own command trains packed documents over ranks as in one process, from examples/axolotl.

axolotl runs in a process of its own, with the packages of tests/stacks/axolotl.txt: it pins other versions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnmesh

transformers = pytest.importorskip("transformers")
PACKAGES = Path(os.environ.get("ATTNMESH_AXOLOTL_PACKAGES", Path(sys.prefix, "axolotl")))
if not (PACKAGES / "axolotl").is_dir():
    pytest.skip(f"axolotl is not installed in {PACKAGES}: make test-stacks", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "axolotl"
TOLERANCE = 1e-5  # observed: 1.2e-7 for losses and norms of gradients, in float32
RUNS = {"packed": {}}  # changes of the configuration


def run(script, *args, cwd):
    paths = [PACKAGES, Path(attnmesh.__file__).parents[1]]
    ran = subprocess.run(
        [sys.executable, str(script), *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=900,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1",
        },
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-8000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of the runs: each in one process, by axolotl alone, and over 2 ranks."""
    folder = tmp_path_factory.mktemp("axolotl")
    run(EXAMPLE / "prepare.py", cwd=folder)
    runs = []
    for name, changes in RUNS.items():
        alone = {"context_parallel_size": 1, "output_dir": f"{name}-1"}
        runs.append([1, str(EXAMPLE / "packed.yml"), {**changes, **alone}])
        runs.append([2, str(EXAMPLE / "packed.yml"), {**changes, "output_dir": f"{name}-2"}])
    (folder / "runs.json").write_text(json.dumps(runs))
    run(Path(__file__).with_name("axolotl_runs.py"), "runs.json", cwd=folder)
    return folder


def history(folder, name, world):
    return json.loads((folder / f"{name}-{world}" / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_logged_values_and_trained_weights_equal_one_process(trained, name):
    from safetensors.torch import load_file

    one, two = history(trained, name, 1), history(trained, name, 2)
    assert len(one) == len(two)
    compared = 0
    for alone, over_ranks in zip(one, two, strict=True):
        for key in {"loss", "grad_norm", "eval_loss"} & alone.keys():
            assert over_ranks[key] == pytest.approx(alone[key], rel=TOLERANCE), (alone, over_ranks)
            compared += 1
    assert compared >= 11  # 5 losses, 5 norms, an evaluation
    weights = [load_file(trained / f"{name}-{world}" / "model.safetensors") for world in (1, 2)]
    for key, alone in weights[0].items():
        torch.testing.assert_close(weights[1][key], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(1800)
def test_batches_have_lengths_that_the_ranks_do_not_divide(trained):
    totals = [entry["tokens/total"] for entry in history(trained, "packed", 2) if "loss" in entry]
    steps = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    assert any(tokens % 2 for tokens in steps)  # of two batches together, so that one of them is odd


@pytest.mark.timeout(1800)
def test_a_packed_document_does_not_see_the_others(trained):
    """The evaluation before training is the mean over documents that a model computes alone: all have 10 tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "build" / "axolotl" / "model")
    losses = []
    for line in (trained / "build" / "axolotl" / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        with torch.no_grad():
            losses.append(model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss)
    first = next(entry["eval_loss"] for entry in history(trained, "packed", 2) if "eval_loss" in entry)
    assert first == pytest.approx(float(torch.stack(losses).mean()), rel=TOLERANCE)
