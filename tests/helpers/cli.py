"""Run commands in this process, and read what they print."""

import re

from typer.testing import CliRunner

from attnmesh.cli.main import app


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
