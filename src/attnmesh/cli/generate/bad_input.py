"""What a person asked for that cannot be done."""


class BadInput(ValueError):  # noqa: N818 - what is wrong is the input, not the program
    """Something asked for that cannot be done, and why: one line, said before any rank starts."""
