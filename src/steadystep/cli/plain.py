"""Text from a file, made safe for a terminal."""

_LONGEST = 600  # letters


def plain(text: str) -> str:
    """Without control characters: names in a log are anybody's, and a terminal obeys some."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def plain_line(text: str) -> str:
    """The same as one line of bearable length; what is left out is the middle, for the end says what to do."""
    clean = plain(" ".join(text.split()))
    half = _LONGEST // 2
    return clean if len(clean) <= _LONGEST else f"{clean[:half]} … {clean[-half:]}"
