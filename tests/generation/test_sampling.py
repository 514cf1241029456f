"""Sampling follows the probabilities, prompt lookup finds the longest match, and text is returned once complete."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.generation.sampling import PromptLookup, Sampling, TextStream
from helpers.cases import first, sweep
from helpers.texts import any_text

SHARES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)
DRAWS = 2000


def frequencies(sampling, logits=None, draws=DRAWS):
    generator = sampling.generator(0)
    logits = SHARES.log() if logits is None else logits
    drawn = torch.tensor([sampling.sample(logits, generator) for _ in range(draws)])
    return torch.bincount(drawn, minlength=len(logits)) / draws


def close(found, expected):
    """Within five standard deviations, which chance leaves once in a million."""
    return ((found - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("temperature", [0.5, sweep(1.0), sweep(2.0)])
def test_a_temperature_sharpens_or_flattens(temperature):
    expected = SHARES ** (1 / temperature)
    assert close(frequencies(Sampling(temperature)), expected / expected.sum())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    first(
        1,
        [
            (0.4, [1]),
            (0.41, [1, 3]),
            (1.0, range(5)),
            *(sweep(*case) for case in ((0.3, [1]), (0.7, [1, 3]), (0.84, [1, 3, 2]))),
        ],
    ),
)
def test_top_p_keeps_the_likeliest_that_make_it_up(top_p, kept):
    expected = torch.zeros(5, dtype=torch.float64)
    expected[list(kept)] = SHARES[list(kept)]
    found = frequencies(Sampling(1.0, top_p - 1e-9 if top_p < 1 else top_p))
    assert (found[expected == 0] == 0).all()
    assert close(found, expected / expected.sum())


def test_temperature_comes_before_top_p():
    flat = SHARES**0.1 / (SHARES**0.1).sum()
    assert (frequencies(Sampling(10.0, 0.95), draws=300) > 0).sum() == 5  # all are about as likely by then
    assert (frequencies(Sampling(10.0, float(flat.max()) * 0.9), draws=300) > 0).sum() == 1


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1), [1]),
        sweep(Sampling(1.0, top_k=3), [1, 3, 2]),
        sweep(Sampling(1.0, 0.56, top_k=2), [1]),  # 0.4 / 0.7 is more than top_p
        sweep(Sampling(1.0, top_k=9), range(5)),
        sweep(Sampling(1.0, min_p=0.37), [1, 3, 2]),
        sweep(Sampling(1.0, min_p=1.0), [1]),
        sweep(Sampling(2.0, min_p=0.49), [1, 3, 2, 4]),  # after the temperature: 0.1 ** 0.5 is half of 0.4 ** 0.5
    ],
)
def test_top_k_and_min_p_keep_the_likeliest(sampling, kept):
    share = torch.zeros(5, dtype=torch.float64)
    share[list(kept)] = SHARES[list(kept)] ** (1 / sampling.temperature)
    found = frequencies(sampling)
    assert (found[share == 0] == 0).all()
    assert close(found, share / share.sum())


def test_what_is_kept_is_what_transformers_keeps():
    from transformers import generation as hf

    logits = torch.randn(40, dtype=torch.float64)
    prompt, answer = [3, 4, 5, 3], [6, 7, 4]
    sampling = Sampling(0.7, 0.9, top_k=12, min_p=0.02, repetition_penalty=1.3)
    ids = torch.tensor([[*prompt, *answer]])
    scores = hf.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[None])
    for processor in (
        hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(12), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.02),
    ):  # fmt: skip
        scores = processor(ids, scores)
    generator = sampling.generator(0)
    drawn = torch.tensor([sampling.sample(logits, generator, prompt, answer) for _ in range(DRAWS)])
    found, expected = torch.bincount(drawn, minlength=40) / DRAWS, scores[0].softmax(-1)
    assert 2 < (expected > 0).sum() < 12
    assert (found[expected == 0] == 0).all()
    assert close(found, expected)


def test_penalties_are_for_tokens_that_came_before():
    logits = torch.tensor([2.0, 1.9, -1.0, 1.8])
    greedy = Sampling(presence_penalty=0.15)
    assert greedy.sample(logits, greedy.generator(0), prompt=[0]) == 0  # of the answer only
    assert greedy.sample(logits, greedy.generator(0), answer=[0, 0]) == 1
    assert greedy.sample(logits, greedy.generator(0), answer=[0, 1]) == 0
    greedy = Sampling(frequency_penalty=0.15)
    assert greedy.sample(logits, greedy.generator(0), prompt=[0]) == 0  # of the answer only
    assert greedy.sample(logits, greedy.generator(0), answer=[0]) == 1
    assert greedy.sample(logits, greedy.generator(0), answer=[0, 1, 1]) == 0
    assert greedy.sample(logits, greedy.generator(0), answer=[0, 1, 0, 1]) == 3
    greedy = Sampling(repetition_penalty=1.2)
    assert greedy.sample(logits, greedy.generator(0), prompt=[0], answer=[1]) == 3
    assert logits[0] == 2.0  # not changed
    with pytest.raises(ValueError, match="answer must have token ids 0 to 3, got 4 to 4"):
        greedy.sample(logits, greedy.generator(0), answer=[4])


def test_seeds_rows_and_tokens_have_random_numbers_of_their_own():
    def first(seed, row=0, token=0):
        return float(torch.rand((), generator=Sampling(seed=seed).generator(row, token)))

    numbers = [first(seed, row, token) for seed in (0, 1, 4096, 2**40) for row in (0, 1) for token in (0, 1, 2)]
    assert len(set(numbers)) == len(numbers)


def test_a_tiny_top_p_and_a_tiny_temperature_are_greedy():
    logits = torch.randn(200)
    for sampling in (Sampling(), Sampling(1.0, 1e-12), Sampling(1e-6), Sampling(1e-320)):
        assert sampling.sample(logits, sampling.generator(3)) == int(logits.argmax())
    assert Sampling().greedy
    assert not Sampling(1e-320).greedy


def test_a_row_has_its_own_generator():
    logits = torch.randn(1000)

    def drawn(seed, row):
        sampling = Sampling(1.0, seed=seed)
        generator = sampling.generator(row)
        return tuple(sampling.sample(logits, generator) for _ in range(5))

    assert drawn(3, 1) == drawn(3, 1)
    assert len({drawn(seed, row) for seed in range(4) for row in range(4)}) == 16


def test_half_precision_is_drawn_like_double():
    sampling = Sampling(0.7, 0.9)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = torch.randn(64).to(dtype)
        a, b = sampling.generator(0), sampling.generator(0)
        draws = [(sampling.sample(logits, a), sampling.sample(logits.double(), b)) for _ in range(20)]
        assert all(x == y for x, y in draws)


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    found = frequencies(Sampling(1.0), logits, 500)
    assert found[1] == found[3] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"seed": 2**60}, "seed must be an integer from 0 to .*, got 1152921504606846976"),
        ({"seed": 1.5}, "seed must be an integer from 0 to .*, got 1.5"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a positive number, got 0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a finite number, got inf"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a finite number, got '1'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


# Prompt lookup.


def searched(ids, most, longest=4):
    """What followed the last place, before the end, of the longest run that the text ends with."""
    for n in range(min(longest, len(ids)), 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                return ids[end : end + most]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=20), st.integers(1, 8)
)
def test_lookup_matches_a_search(ids, growths, most):
    lookup, length = PromptLookup(), min(len(ids), 5)
    while True:
        assert lookup.draft(ids[:length], most) == searched(ids[:length], most)
        if length == len(ids) or not growths:
            break
        length = min(len(ids), length + growths.pop())


def test_the_longest_match_wins_and_the_latest_of_its_places():
    assert PromptLookup().draft([1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 1, 2, 3], 4) == [9, 2, 3, 8]
    assert PromptLookup().draft([5, 1, 6, 5, 2, 6, 5], 2) == [2, 6]
    assert PromptLookup().draft([4, 4, 4, 4, 4, 4], 3) == [4]  # the place before the end has but one token behind it
    assert PromptLookup().draft([1, 2, 3], 4) == []
    assert PromptLookup().draft([1], 4) == []


def test_a_draft_may_be_as_long_as_the_text_has_it():
    text = [*range(20), 0, 1]
    assert PromptLookup().draft(text, 3) == [2, 3, 4]
    assert PromptLookup().draft(text, 100) == [*range(2, 20), 0, 1]


# Text.


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
    text = TextStream(tokenizer)
    return [text.add(token) for token in ids]


def test_a_character_comes_with_its_last_byte(tokenizer):
    ids = tokenizer("aé€😀b")["input_ids"]
    assert len(ids) == 1 + 2 + 3 + 4 + 1
    assert pieces(tokenizer, ids) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@settings(max_examples=25, deadline=None)
@given(any_text(30))
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


def test_the_text_of_a_long_answer_is_decoded_in_short_pieces(tokenizer):
    class Counted:
        decoded = 0

        def decode(self, ids, **how):
            self.decoded += len(ids)
            return tokenizer.decode(ids, **how)

    text = "ab é 😀 " * 100
    ids, counted = tokenizer(text)["input_ids"], Counted()
    assert "".join(pieces(counted, ids)) == text
    assert counted.decoded < 12 * len(ids)


def test_spaces_that_depend_on_the_token_before_are_kept():
    """Decoders of SentencePiece models drop the space at the beginning of a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "\u2581Hello", "\u2581world", "!"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    assert pieces(tokenizer, [2, 3, 1, 3, 4]) == ["Hello", " world", "", " world", "!"]
    assert pieces(tokenizer, [0, 2, 3]) == ["", "Hello", " world"]


def test_without_a_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2]) == ["", ""]
