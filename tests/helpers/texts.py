"""Random text."""

from hypothesis import strategies as st

_CHARACTERS = (st.integers(0, 0xFF) | st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)).map(chr)
_SURROGATES = st.integers(0xD800, 0xDFFF).map(chr)


def any_text(max_size: int, *, min_size: int = 0, surrogates: bool = False) -> st.SearchStrategy[str]:
    """Any characters. `st.text` would make a table of all of Unicode first, in every process, for 2 s."""
    characters = _CHARACTERS | _SURROGATES if surrogates else _CHARACTERS
    return st.lists(characters, min_size=min_size, max_size=max_size).map("".join)
