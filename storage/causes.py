"""Whether what a process lacks is behind an error, by number or by a library's text.

Libraries pass it on as text, and so do executors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from cutline.storage.errors import SnapshotError

# A server's message begins with its severity: the server lacks it.
OF_SERVER = re.compile(r"\b[A-Z]{3,}:  ")


def is_behind(error: BaseException, numbers: Collection[int], says: Callable[[str], bool]) -> bool:
    """Whether this error, or one that caused it, is an OSError with one of the `numbers`, or `says` so of its text."""
    for link in _links(error):
        if isinstance(link, OSError) and link.errno in numbers:
            return True
        text = link.message if isinstance(link, SnapshotError) else ""
        # An exception of Java's asks its process, which may have ended.
        with suppress(Exception):
            text = text or str(link)
        if isinstance(link, MemoryError):
            text = f"{type(link).__name__}: {text}"
        # A server's errors have an SQLSTATE, those of its client library none; the first cause says whose text it is.
        is_server = any(getattr(one, "sqlstate", None) for one in (link, link.__cause__))
        if not is_server and not OF_SERVER.search(text) and says(text):
            return True
    return False


def _links(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
