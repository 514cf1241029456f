"""The commands and the manifest of docs/cluster.md are valid: shell syntax, options and fields that exist."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from textwrap import dedent

import click
import pytest
import typer
from torch.distributed.run import get_args_parser

from attnmesh.cli.main import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cluster.md").read_text()

# The fields of a PyTorchJob (kubeflow.org/v1), from the sources of the Training Operator.
ELASTIC_FIELDS = {
    "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
    "nProcPerNode", "maxRestarts", "metrics",
}  # fmt: skip
SPEC_FIELDS = {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
REPLICA_FIELDS = {"replicas", "template", "restartPolicy"}


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", PAGE, flags=re.M | re.S)
    return [dedent(text) for _, text in found]


def commands() -> list[list[str]]:
    """The words of every command, with continued lines joined."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if re.match(r"(srun |torchrun |attnmesh )", line)]


def check_torchrun(words: list[str]) -> None:
    """torchrun knows its options, and the program knows the rest."""
    arguments = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    if arguments.module:
        assert arguments.training_script == "attnmesh"
        check_attnmesh(arguments.training_script_args)
    else:
        program = (ROOT / arguments.training_script).read_text()
        options = [word for word in arguments.training_script_args if word.startswith("--")]
        assert all(f'"{option}"' in program for option in options), options


@cache
def command_line() -> click.Command:
    return typer.main.get_command(app)


def check_attnmesh(words: list[str]) -> None:
    """The command line parses them; nothing is run."""
    command = command_line()
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, parent=context)
    command.make_context(command.name, words)


def test_shell_blocks_are_valid():
    for block in blocks("bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_have_options_that_exist(words):
    if "torchrun" in words:
        check_torchrun(words)
    else:
        check_attnmesh(words[1:])


def test_the_page_has_commands_of_every_kind():
    found = [" ".join(words) for words in commands()]
    assert all(any(kind in command for command in found) for kind in ("srun", "--nnodes 1:2", "verify", "simulate"))


def test_the_manifest_is_a_pytorch_job():
    yaml = pytest.importorskip("yaml")
    (job,) = (yaml.safe_load(block) for block in blocks("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"].keys() <= SPEC_FIELDS
    elastic = job["spec"]["elasticPolicy"]
    assert elastic.keys() <= ELASTIC_FIELDS
    assert job["spec"]["pytorchReplicaSpecs"].keys() == {"Worker"}
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker.keys() <= REPLICA_FIELDS
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    check_torchrun(container["command"])
    assert all(isinstance(variable["value"], str) for variable in container["env"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
