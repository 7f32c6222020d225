"""Untrusted text on its way to a terminal."""


def escaped(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters, escape codes among them, shown as `\\x1b`."""
    return "".join(
        character if character.isprintable() or character == " " else repr(character)[1:-1] for character in text
    )


def preview(line: str, limit: int) -> str:
    """A line's first characters; the label before the text does not count."""
    label, text = line[:8], " ".join(line[8:].split())
    return label + (text if len(text) <= limit else text[:limit] + "…")
