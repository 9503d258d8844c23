"""Names that are odd, each made different by a number at its end."""

from __future__ import annotations

NAME_BYTES_MAX = 63
ODD = (
    "plain", "Capitals", "with space", 'q"uote', "sing'le", "é", "𝄞", "select", "per%sent", "%(x)s", "back\\slash",
    "dot.ted", "com,ma", "st*r", "a[b]", "{brace}", "new\nline", "tab\there", "semi;colon", "-- comment", "$$", "/*",
    "\\.", "a=b", "?", ":x", "\x7f", "long" + "x" * NAME_BYTES_MAX, "é" * NAME_BYTES_MAX, "/slash", "..", "#", "\u202e",
)  # fmt: skip


# Of the whole server: a ground has them, so that cases may name them.
ROLES = ("fuzz owner", "Fuzz.reader")


def is_name_in(word: str, encoding: str) -> bool:
    """Whether the word can be a name, and a part of the names that PostgreSQL makes of it, in such a database.

    In SQL_ASCII PostgreSQL cuts what is too long within a character, and such a name is refused.
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
    """The name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'
