"""How far a text is from another: Levenshtein's distance, and what is compared of a text."""

import unicodedata


def edit_distance(a: str, b: str) -> int:
    """The fewest insertions, deletions and replacements of one character that turn ``a`` into ``b``."""
    previous = list(range(len(b) + 1))
    for row, left in enumerate(a, 1):
        current = [row]
        for column, right in enumerate(b, 1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (left != right)))
        previous = current
    return previous[-1]


def comparable(text: str) -> str:
    """The text as it is compared: Unicode's NFKC, without regard to case, without any space."""
    return "".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def similarity(wanted: str, found: str) -> float:
    """1 - distance / length of the longer, 0 to 1, of the two texts as they are compared; both empty are the same."""
    wanted, found = comparable(wanted), comparable(found)
    longest = max(len(wanted), len(found))
    return 1.0 - edit_distance(wanted, found) / longest if longest else 1.0
