"""The commands that pages show exist, with the options that they are shown with.

Commands in code blocks are parsed as the command line parses them; nothing is run. Commands within a sentence, and
those with a placeholder, may lack arguments: their options must exist. Pages' Python blocks run in test_readme.py.
"""

import re
import shlex
from pathlib import Path

import click
import pytest

from test_cluster_page import check_attnmesh, check_torchrun, command_line

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EVERYWHERE = {"--help", "--install-completion", "--show-completion"}
PLACEHOLDER = re.compile(r"\.\.\.|path/to|benchmarks\.NAME|--no-python")


def in_blocks(text: str) -> list[str]:
    """The lines of blocks that are neither Python nor output, with continued lines joined."""
    found: list[str] = []
    language = None  # of the block that a line is in
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("```"):
            language = line.strip()[3:] if language is None else None
        elif language in ("", "bash"):
            found.append(line.strip())
    return found


def in_sentences(text: str) -> list[str]:
    without = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without)]


def check_options(words: list[str]) -> None:
    """The subcommand exists, and has the options among the words; values are not looked at."""
    command = command_line()
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known - EVERYWHERE
    assert not unknown, f"no options {unknown}"


def check_benchmark(words: list[str]) -> None:
    """The benchmark exists, and its sources have the options."""
    name = words[2].removeprefix("benchmarks.").replace(".", "/")
    path = ROOT / "benchmarks" / name
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    source = "".join(file.read_text() for file in (*files, ROOT / "benchmarks" / "common.py"))
    for word in words[3:]:
        if word.startswith("--") and word not in EVERYWHERE:
            option = word.partition("=")[0]
            assert f'"{option}"' in source or f"{option[2:].replace('-', '_')}:" in source, f"no option {option}"


def check(command: str, *, whole: bool) -> bool:
    """Check a command; returns whether it is one that this test knows."""
    if not command.startswith(("attnmesh ", "torchrun ", "python -m benchmarks.")):
        return False
    words = shlex.split(command, comments=True)
    whole = whole and not PLACEHOLDER.search(command)
    if words[0] == "attnmesh":
        check_attnmesh(words[1:]) if whole else check_options(words[1:])
    elif words[0] == "torchrun" and whole:
        check_torchrun(words)
    elif words[0] == "python" and not PLACEHOLDER.search(command):
        check_benchmark(words)
    return True


def wrong(text: str) -> tuple[int, list[str]]:
    """The number of commands on a page, and what is wrong with them."""
    count, found = 0, []
    for whole, commands in ((True, in_blocks(text)), (False, in_sentences(text))):
        for command in commands:
            try:
                count += check(command, whole=whole)
            except (AssertionError, OSError, ValueError, click.ClickException, SystemExit) as error:
                found.append(f"{command}: {error!r}")
    return count, found


def test_commands_of_pages_exist():
    checked = {page.relative_to(ROOT).as_posix(): wrong(page.read_text()) for page in PAGES}
    assert {page: found for page, (_, found) in checked.items() if found} == {}
    assert checked["docs/planning.md"][0] > 5
    assert sum(count for count, _ in checked.values()) > 100


@pytest.mark.parametrize(
    "page",
    [
        "```\nattnmesh plan prefill --model llama-3.1-8b --length 128k --ranks 8 --nodes 2\n```\n",
        "```bash\nattnmesh plan prefill --length 128k\n```\n",
        "```\nattnmesh bench ring\n```\n",
        "`attnmesh serve --no-such-option`",
        "`python -m benchmarks.ring --no-such-option`",
        "`python -m benchmarks.no_such_benchmark`",
    ],
)
def test_a_planted_command_is_reported(page):
    assert wrong(page)[1]
