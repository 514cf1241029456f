"""Text comes out as soon as it is certain, and together it is the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.generation.sampling import NewText


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte, as byte-level tokenizers have it where nothing was merged, and one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>")


def pieces(tokenizer, ids):
    text = NewText(tokenizer)
    return [text.add(token) for token in ids]


def test_a_character_comes_with_its_last_byte(tokenizer):
    ids = tokenizer("aé€😀b")["input_ids"]
    assert len(ids) == 1 + 2 + 3 + 4 + 1
    assert pieces(tokenizer, ids) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30))
def test_the_pieces_make_the_text(tokenizer, text):
    if text.endswith("\ufffd"):
        text += "."  # what a tokenizer says of half a character, too: it is held back until more comes
    assert "".join(pieces(tokenizer, tokenizer(text)["input_ids"])) == text


def test_bytes_that_are_no_text_do_not_stop_it(tokenizer):
    a, e = tokenizer("a")["input_ids"], tokenizer("é")["input_ids"]
    assert "".join(pieces(tokenizer, [*a, e[0], *a, *a])) == "a\ufffdaa"
    assert pieces(tokenizer, [*a, e[0]]) == ["a", ""]


def test_special_tokens_are_silent(tokenizer):
    assert pieces(tokenizer, [*tokenizer("ok")["input_ids"], tokenizer.eos_token_id]) == ["o", "k", ""]


def test_without_a_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2]) == ["", ""]
