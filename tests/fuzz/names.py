"""Odd names, each made unique by a number at its end."""

from __future__ import annotations

NAME_BYTES_MAX = 63
ODD = (
    "plain", "Capitals", "with space", 'q"uote', "sing'le", "é", "𝄞", "select", "per%sent", "%(x)s", "back\\slash",
    "dot.ted", "com,ma", "st*r", "a[b]", "{brace}", "new\nline", "tab\there", "semi;colon", "-- comment", "$$", "/*",
    "\\.", "a=b", "?", ":x", "\x7f", "long" + "x" * NAME_BYTES_MAX, "é" * NAME_BYTES_MAX, "/slash", "..", "#", "\u202e",
)  # fmt: skip


# Roles belong to the whole server: every Ground creates these, so that cases may name them.
ROLES = ("fuzz owner", "Fuzz.reader")


def is_name_in(word: str, encoding: str) -> bool:
    """Whether a database of this encoding allows the word in names, and in the names that PostgreSQL derives from it.

    In SQL_ASCII PostgreSQL truncates a long name within a character, and such a name is refused.
    """
    if encoding == "LATIN1":
        return word.isascii() or word[0] < "\u0100"
    return encoding != "SQL_ASCII" or word.isascii() or len(word.encode()) < NAME_BYTES_MAX


def numbered(word: str, number: int) -> str:
    """The word with the number at its end, in at most 63 bytes."""
    end = str(number)
    kept = word.encode()[: NAME_BYTES_MAX - len(end)].decode(errors="ignore")
    return kept + end


def quoted(name: str) -> str:
    """The name, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'
