"""Tools: each public function is one. The policy reads its type hints and its docstring."""

STOCK = {"apple": 3, "pear": 0, "plum": 12}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def look_up(fruit: str) -> str:
    """Return how many pieces of a fruit are in stock.

    Args:
        fruit: The name of the fruit, in the singular.
    """
    if fruit not in STOCK:
        raise ValueError(f"unknown fruit; known: {', '.join(STOCK)}")
    return f"{STOCK[fruit]} pieces"
