"""Creating the objects of which it does not matter who has stored them, only that they are there.

That is all but commits and voids: those decide something, and are put by who looks into a lost answer by itself. A put
of such an object whose answer was lost is read back. Where that does not tell, the command fails, and nothing is
indeterminate: an object that arrives late changes nothing that anybody relies on (docs/storage.md, "Lost answers").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from storage.digest import digest
from storage.errors import UnreachableError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore

READ_BACK_PAUSES_SECONDS = (0.2, 1.0, 3.0)
# What looking for an object raises where that tells nothing of a put.
NOTHING_TOLD: tuple[type[Exception], ...] = (ObjectMissingError, UnreachableError)
T = TypeVar("T")


class StoreAnswersLostError(UnreachableError):
    """A store takes objects and its answers get lost: whether one was stored can't be told. It was no commit."""


def create_or_find(store: ObjectStore, key: str, body: bytes) -> None:
    """Return once the object `key` of just these bytes is known to be in the store.

    Raises ObjectExistsError if the key has other bytes, StoreAnswersLostError if nobody can tell.
    """
    try:
        store.create(key, body)
    except ObjectExistsError:
        # Not every store tells its own repeated put from another's.
        with suppress(ObjectMissingError):
            if _is_there(store, key, body):
                return
        raise
    except AnswerLostError as error:
        found = read_back(lambda: _is_there(store, key, body))
        if found is None:
            raise StoreAnswersLostError(
                f"{error.message}, and reading it back did not tell whether it was stored",
                hint="repeat the command once the store answers; the object is no commit, and does no harm if it"
                " arrives late",
                details=error.details,
            ) from error
        if not found:
            raise ObjectExistsError(url=store.url, key=key) from error


def read_back(
    look: Callable[[], T], unclear: tuple[type[Exception], ...] = NOTHING_TOLD, *, at_once: bool = False
) -> T | None:
    """What `look` finds of a put whose answer was lost; None if it raises one of `unclear` each time it is called.

    A put may arrive later than its answer was given up, so an object that is missing tells nothing. The first look
    comes after a pause, unless `at_once`.
    """
    for pause in (0.0, *READ_BACK_PAUSES_SECONDS) if at_once else READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        with suppress(*unclear):
            return look()
    return None


def _is_there(store: ObjectStore, key: str, body: bytes) -> bool:
    return store.size(key) == len(body) and store.digest(key) == digest(body)
