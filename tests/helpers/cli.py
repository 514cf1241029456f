"""Run commands in this process, and read what they print."""

import functools
import re

import typer.testing

from attnmesh.cli.main import app

# It would build the command anew for every run, which takes longer than most runs.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def run(*arguments: object, env: dict[str, str] | None = None):
    runner = typer.testing.CliRunner()
    return runner.invoke(app, [str(argument) for argument in arguments], prog_name="attnmesh", env=env)


def words(output: str) -> str:
    """Return the text without frames and line breaks."""
    return " ".join(re.sub(r"[^\w\s.,:;/()\[\]=?'+%-]", " ", output).split())


def assert_refused(ran, *expected: str) -> None:
    """Assert exit status 2 and a short message with these texts, no traceback."""
    assert ran.exit_code == 2, ran.output
    for text in expected:
        assert text in words(ran.output)
    assert "Traceback" not in ran.output
    assert ran.output.count("\n") < 25
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
