"""Create objects for which only their existence matters, not which process stored them.

These are all objects except commits and voids: those decide something, and their callers resolve lost answers
themselves. Here an object whose answer was lost is read back. If that is inconclusive the command fails, but nothing is
indeterminate: an object that arrives late changes nothing that anything depends on (docs/store-format.md, "Lost
answers").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cutline.storage.digest import digest
from cutline.storage.errors import UnreachableError
from cutline.storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.stored_form import stored_form

READ_BACK_PAUSES_SECONDS = (0.2, 1.0, 3.0)
# The errors of a lookup that leave it open whether a put was stored.
INCONCLUSIVE: tuple[type[Exception], ...] = (ObjectMissingError, UnreachableError)
T = TypeVar("T")


class StoreAnswersLostError(UnreachableError):
    """The answer to a create was lost, and it is not known whether the object, which is no commit, was stored."""


def create_or_find(store: ObjectStore, key: str, body: bytes) -> str:
    """Create the object; return the digest of the stored bytes once they are known to be in the store.

    Raises ObjectExistsError if the key has other bytes, StoreAnswersLostError if that can't be found out.
    """
    form = stored_form(store)
    stored = form.encode(key, body)
    _create_or_find(form.raw, key, stored)
    return digest(stored)


def _create_or_find(store: ObjectStore, key: str, body: bytes) -> None:
    try:
        store.create(key, body)
    except ObjectExistsError:
        # Not every store distinguishes its own retried put from another client's.
        with suppress(ObjectMissingError):
            if _is_there(store, key, body):
                return
        raise
    except AnswerLostError as error:
        is_stored = read_back(lambda: _is_there(store, key, body))
        if is_stored is None:
            raise StoreAnswersLostError(
                f"{error.message}, and reading it back did not show whether it was stored",
                hint="repeat the command once the store answers; the object is not a commit and does no harm if it"
                " arrives late",
                details=error.details,
            ) from error
        if not is_stored:
            raise ObjectExistsError(url=store.url, key=key) from error


def read_back(
    look: Callable[[], T], unclear: tuple[type[Exception], ...] = INCONCLUSIVE, *, at_once: bool = False
) -> T | None:
    """Look for a put whose answer was lost: return what `look` returns, None if it raises one of `unclear` every time.

    A put may arrive after its answer was given up, so a missing object proves nothing. The first look comes after a
    pause, unless `at_once`.
    """
    for pause in (0.0, *READ_BACK_PAUSES_SECONDS) if at_once else READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        with suppress(*unclear):
            return look()
    return None


def _is_there(store: ObjectStore, key: str, body: bytes) -> bool:
    return store.size(key) == len(body) and store.digest(key) == digest(body)
