"""Numbers of positions, as people write them, and timeouts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.comm import SoloComm, comm_from, run_virtual
from attnmesh.utils.validation import MAX_TIMEOUT, check_timeout, parse_length
from helpers.texts import any_text

SUFFIXES = {"": 1, "k": 1024, "K": 1024, "m": 1024**2, "M": 1024**2}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("100000", 100_000),
        ("128k", 131_072),
        ("1M", 1_048_576),
        ("1.5M", 1_572_864),
        ("0.5k", 512),
        (" 8K ", 8192),
        ("100M", 104_857_600),
        ("2.0", 2),
    ],
)
def test_lengths_with_suffixes(text, count):
    assert parse_length(text) == count


@given(count=st.integers(1, 2047), suffix=st.sampled_from(list(SUFFIXES)))
def test_a_whole_number_times_its_suffix(count, suffix):
    assert parse_length(f"{count}{suffix}") == count * SUFFIXES[suffix]


@given(quarters=st.integers(1, 8191), suffix=st.sampled_from("kKmM"))
def test_quarters_are_exact(quarters, suffix):
    assert parse_length(f"{quarters / 4}{suffix}") == quarters * SUFFIXES[suffix] // 4


BAD = [
    "",
    "0",
    "0k",
    "-1",
    "-1M",
    "1.5",
    "0.3k",
    "1e6",
    "1G",
    "1 M",
    "1kk",
    "k",
    "1.M",
    ".5M",
    "1_000",
    "inf",
    "٣",
    "1,000",
]


@pytest.mark.parametrize("text", BAD)
def test_other_text_raises(text):
    with pytest.raises(ValueError, match="a length must be .* got " + repr(text)):
        parse_length(text)


@settings(max_examples=30)
@given(any_text(12))
def test_text_without_digits_raises(text):
    if any(character.isascii() and character.isdigit() for character in text):
        return
    with pytest.raises(ValueError, match="a length must be"):
        parse_length(text)


@pytest.mark.parametrize("timeout", [1, 0.001, 300.0, MAX_TIMEOUT])
def test_a_timeout_is_positive_seconds(timeout):
    assert check_timeout(timeout) == timeout


@pytest.mark.parametrize(
    "timeout", [0, -1, math.inf, -math.inf, math.nan, 1e10, MAX_TIMEOUT + 1, 2**5000, "10", None, True, [1], 1j]
)
def test_other_timeouts_are_refused_where_they_are_given(timeout):
    refused = pytest.raises(ValueError, match=r"^timeout must be positive seconds, at most 1,000,000, got ")
    with refused:
        check_timeout(timeout)
    with refused:
        SoloComm(timeout)
    with refused:
        run_virtual(1, print, timeout=timeout)
    if timeout is not None:  # the default of comm_from
        with refused:
            comm_from(SoloComm(), timeout=timeout)
