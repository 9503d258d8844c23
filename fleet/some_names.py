"""Long lists in messages: the first names, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable


def list_some(names: Iterable[str], most: int) -> str:
    """The first `most` names: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def join_some(texts: Iterable[str], most: int) -> str:
    """The first `most` texts, which may have commas: `a; b; and 3 more`."""
    listed = list(texts)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return "; ".join([*listed[:most], *more])
