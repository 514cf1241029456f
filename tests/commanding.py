"""Commands run as a person would, and what they print as words."""

import re

from typer.testing import CliRunner

from attnmesh.cli.main import app


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(output: str) -> str:
    """The text without frames and folds."""
    return " ".join(re.sub(r"[^\w\s.,:;/()\[\]=?'+%-]", " ", output).split())


def assert_refused(ran, *said: str) -> None:
    """Exit status 2 and a message on one screen, no traceback."""
    assert ran.exit_code == 2, ran.output
    for text in said:
        assert text in words(ran.output)
    assert "Traceback" not in ran.output
    assert ran.output.count("\n") < 25
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
