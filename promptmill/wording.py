"""Numbers in sentences."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
