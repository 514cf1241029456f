"""A signal ends a command soon, with one line, its exit code, and none of its processes left."""

import random
import re
import signal
import sys
import time

import pytest

from helpers.cases import sweep
from helpers.commands import ATTNMESH, TORCHRUN, Command, Ended

SOON = 30  # seconds, on a machine that is busy with other tests
PATIENCE = 15  # seconds in which two ranks import torch, one after the other on a busy machine
DOCUMENT = "a b c d e f g h i j k l " * 4
INTERRUPT, TERMINATE, STOP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    """A command that generates for longer than any test."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from helpers.models import tiny_llama, write_folder

    model = tiny_llama(max_position_embeddings=100_000, eos_token_id=None)
    folder = write_folder(tmp_path_factory.mktemp("model"), model)
    arguments = ("--model", folder, "--prompt", DOCUMENT, "--max-new-tokens", 90_000)
    return [*ATTNMESH, "generate", *arguments]


def ended(command: Command, code: int, line: str, soon: float = SOON) -> Ended:
    found = command.wait(soon)
    assert found.code == code, found
    assert len(found.noise) == 1, found
    assert re.fullmatch(line, found.noise[0]), found
    assert found.left == [], found
    return found


def answering(command: Command) -> list[int]:
    """Wait until the ranks answer."""
    assert "ranks" in command.line()
    command.read(20)
    return command.ranks()


@pytest.mark.parametrize(("number", "code", "said"), [(INTERRUPT, 130, "interrupted"), (TERMINATE, 143, "terminated")])
@pytest.mark.parametrize("delay", [0.0, sweep(0.5)])
def test_a_signal_while_modules_are_imported_is_one_line(number, code, said, delay):
    with Command(*ATTNMESH, "simulate", "--ranks", 2, "--length", "1k") as command:
        command.wait_until_starting()
        time.sleep(delay)
        command.signal(number)
        ended(command, code, f"attnmesh( simulate)?: {said}")


KILLED_WITH_A_SEMAPHORE = """
import multiprocessing, os, signal
from attnmesh import launch
def rank(comm):
    lock = multiprocessing.RLock()  # as tqdm has one
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    launch.run(rank, 1)
"""


@pytest.mark.sweep
def test_killed_ranks_leave_no_words_about_semaphores(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED_WITH_A_SEMAPHORE)
    with Command(sys.executable, script) as command:
        said = command.wait(60).errors
    assert "rank 0 of 1 was killed (SIGKILL)" in said[-1]
    assert not [line for line in said if "leaked" in line]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(INTERRUPT, 130, "interrupted"), sweep(TERMINATE, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_virtual_ranks_end_with_the_command(number, code, said):
    with Command(*ATTNMESH, "verify", "--virtual", "--ranks", 2) as command:
        command.wait_until_says(" of ")  # a rank computes
        command.signal(number)
        ended(command, code, f"attnmesh verify: {said}")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code", "said"), [(INTERRUPT, 130, "interrupted"), (TERMINATE, 143, "terminated")], ids=["INT", "TERM"]
)
@pytest.mark.parametrize(("to", "when"), [("parent", "starting"), ("all", "answering")])
def test_the_ranks_of_generate_end_with_it(generate, number, code, said, to, when):
    with Command(*generate, "--ranks", 2) as command:
        if when == "answering":
            answering(command)
        else:
            command.ranks()
        command.signal(number) if to == "parent" else command.signal_all(number)
        ended(command, code, f"attnmesh generate: {said}")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("delay", "number", "code", "said"),
    [(0.0, INTERRUPT, 130, "interrupted"), (8.0, TERMINATE, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_the_ranks_of_verify_end_with_it(number, code, said, delay):
    with Command(*ATTNMESH, "verify", "--ranks", 2) as command:
        command.ranks()
        time.sleep(delay)
        command.signal(number)
        ended(command, code, f"attnmesh verify: {said}")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code", "said"), [(INTERRUPT, 130, "interrupted"), (TERMINATE, 143, "terminated")], ids=["INT", "TERM"]
)
def test_virtual_ranks_of_generate_end_with_it(generate, number, code, said):
    with Command(*generate, "--ranks", 2, "--virtual") as command:
        command.line()
        command.read(20)
        command.signal(number)
        ended(command, code, f"attnmesh generate: {said}")


@pytest.mark.sweep
@pytest.mark.parametrize("number", [KILL, signal.SIGHUP], ids=["KILL", "HUP"])
def test_no_rank_outlives_its_parent(generate, number):
    with Command(*generate, "--ranks", 2) as command:
        answering(command)
        command.signal(number)
        found = command.wait(SOON)
        assert (found.code, found.noise, found.left) == (128 + number, [], [])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "when", "rank"), [(KILL, "starting", 0), (TERMINATE, "answering", 1), (KILL, "answering", 1)]
)
def test_a_rank_that_ends_ends_the_command(generate, rank, when, number):
    with Command(*generate, "--ranks", 2) as command:
        ranks = answering(command) if when == "answering" else command.ranks()
        command.signal(number, ranks[rank])
        name = signal.Signals(number).name
        blamed = rf"rank {rank} of 2 was killed \({name}\); the other ranks were stopped\. See docs/.*"
        ended(command, 1, f"attnmesh generate: {blamed}")


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["starting", "answering"])
def test_an_interrupted_rank_interrupts_the_command(generate, when):
    with Command(*generate, "--ranks", 2) as command:
        ranks = answering(command) if when == "answering" else command.ranks()
        command.signal(INTERRUPT, ranks[1])
        ended(command, 130, "attnmesh generate: interrupted")


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_stopped_during_rendezvous_is_named_after_the_timeout(generate, rank):
    with Command(*generate, "--ranks", 2, "--timeout", PATIENCE) as command:
        command.signal(STOP, command.ranks()[rank])
        missing = (
            rf"rank {rank} of 2 did not join the others within {PATIENCE} s; the other ranks were stopped\. See docs/.*"
        )
        ended(command, 1, f"attnmesh generate: {missing}", soon=PATIENCE + 2 * SOON)  # the others import torch first


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_stopped_while_it_answers_is_noticed_after_the_timeout(generate, rank):
    with Command(*generate, "--ranks", 2, "--timeout", PATIENCE) as command:
        command.signal(STOP, answering(command)[rank])
        ended(
            command,
            1,
            rf"attnmesh generate: rank {1 - rank} of 2 failed: .*; the other ranks were stopped\. See docs/.*",
            soon=PATIENCE + SOON,
        )


@pytest.mark.sweep
@pytest.mark.parametrize("number", [INTERRUPT, TERMINATE], ids=["INT", "TERM"])
def test_torchrun_ends_its_ranks_soon(generate, number):
    with Command(*TORCHRUN, *generate) as command:
        command.line()
        command.read(20)
        command.signal(number)
        found = command.wait(SOON)
        assert found.code != 0
        assert found.left == []
        ours = [line for line in found.errors if "attnmesh" in line and "torchrun" not in line]
        assert len(ours) <= 2, found  # torchrun itself prints a traceback


@pytest.mark.sweep
def test_a_rank_of_torchrun_that_is_interrupted_ends_at_once(generate):
    with Command(*TORCHRUN, *generate) as command:
        command.line()
        command.read(20)
        command.signal(INTERRUPT, command.processes()[-1])
        found = command.wait(SOON)
        assert found.code == 1
        assert found.left == []


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_signals_at_random_moments_of_the_other_commands(tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    commands = [
        [*ATTNMESH, "trace", "--ranks", 2, "--length", "64k", "--out", tmp_path / "trace.json"],
        [*ATTNMESH, "simulate", "--ranks", 4096, "--length", "100M"],
        [
            *ATTNMESH,
            "plan",
            "prefill",
            "--model",
            "llama-3.1-70b",
            "--ranks",
            8192,
            "--batch",
            4096,
            "--length",
            "128k",
        ],
        [*ATTNMESH, "report", "--ranks", 64, "--length", "100M", "--out", tmp_path / "report.html"],
        [*ATTNMESH, "calibrate", "--device", "cpu", "--out", tmp_path / "hardware.toml"],
    ]
    sent = 0
    for parts in commands:
        for number, code, said in ((INTERRUPT, 130, "interrupted"), (TERMINATE, 143, "terminated")):
            with Command(*parts) as command:
                command.wait_until_starting()
                time.sleep(draw.uniform(0, 4))
                if command.processes() == []:
                    continue  # it was faster
                command.signal_all(number) if draw.random() < 0.5 else command.signal(number)
                ended(command, code, f"attnmesh[a-z ]*: {said}")
                sent += 1
    print(f"{sent} signals")
    assert sent > 4
