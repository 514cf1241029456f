"""The document that questions are about: text from the command line or out of a file."""

from __future__ import annotations

from pathlib import Path

from attnmesh.cli.generate.bad_input import BadInput


def read_document(prompt: str | None, file: Path | None) -> str:
    """The one of the two that was given."""
    if prompt is not None and file is not None:
        raise BadInput("give --prompt or --prompt-file, not both")
    if prompt is None and file is None:
        raise BadInput("there is nothing to read: give --prompt or --prompt-file")
    text = prompt if prompt is not None else _text_of(file)
    if not text.strip():
        raise BadInput("the prompt is empty" if file is None else f"{file} is empty")
    return text


def _text_of(file: Path | None) -> str:
    assert file is not None
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is no text: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None
    if "\0" in text:  # valid UTF-8, and still nothing that anybody has written
        raise BadInput(f"{file} is no text: it has a zero byte")
    return text
