"""The tool of the preset embedded-tools."""

STATELESS = True  # a call leaves nothing behind: the episodes share processes


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b
