"""Text from elsewhere is shown without control characters, on one line where a line is wanted."""

import unicodedata

import pytest
from hypothesis import given

from attnmesh.utils.text import one_line, printable
from helpers.texts import any_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x07\r", r"a\x1b[31mred\x07\r"),
        ("a\nb\tc", "a\nb\tc"),
        ("\x7f\x9b\x00", r"\x7f\x9b\x00"),
        ("abc\u202ecba\u2066x\u2069", r"abc\u202ecba\u2066x\u2069"),
        ("\u2028\u200f\udcff", r"\u2028\u200f\udcff"),
        ("naïve 漢字 🙂 עברית", "naïve 漢字 🙂 עברית"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown


@given(any_text(40, surrogates=True))
def test_nothing_is_left_that_moves_the_cursor_or_turns_the_line(text):
    shown = printable(text)
    left = {character for character in shown if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")}
    assert left <= {"\n", "\t"}
    assert not any(unicodedata.bidirectional(character) in _DIRECTIONS for character in shown)
    shown.encode("utf-8")
    assert len(one_line(text).splitlines()) <= 1


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_one_line_is_one_line_and_not_too_long():
    assert one_line("first\r\n  second\n\nthird\x1b[0m") == r"first second third\x1b[0m"
    assert one_line("a\tb") == r"a\tb"
    assert one_line("x" * 3000) == "x" * 1996 + " ..."
    assert one_line("") == ""
