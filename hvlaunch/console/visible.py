"""Text from elsewhere, made safe for a terminal."""

__all__ = ["visible"]


def visible(text: str) -> str:
    r"""`text` with control characters, which may be a host's, escaped as in Python; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
