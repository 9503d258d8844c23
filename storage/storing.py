"""Create objects that only need to exist, no matter which process stored them.

These are all objects except commits and voids; the callers that store those resolve lost answers themselves. If the
answer to a create is lost, the object is read back. If that is inconclusive, the command fails, but not with
IndeterminateError, because nothing depends on an object that arrives late (docs/store-format.md, "Lost answers").
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
# Lookup errors that leave it unknown whether a put was stored.
INCONCLUSIVE: tuple[type[Exception], ...] = (ObjectMissingError, UnreachableError)
T = TypeVar("T")


class StoreAnswersLostError(UnreachableError):
    """The answer to the create of an object that is not a commit was lost, and reading it back was inconclusive."""


def create_or_find(store: ObjectStore, key: str, body: bytes) -> str:
    """Create the object unless it already exists with these bytes; return the digest of the stored bytes.

    Raises ObjectExistsError if the object exists with other bytes, and StoreAnswersLostError if it is unknown whether
    the object was stored.
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
                f"{error.message}, and reading the object back did not show whether it was stored",
                hint="repeat the command once the store answers; the object is not a commit and does no harm if it"
                " arrives late",
                details=error.details,
            ) from error
        if not is_stored:
            raise ObjectExistsError(url=store.url, key=key) from error


def read_back(
    look: Callable[[], T], unclear: tuple[type[Exception], ...] = INCONCLUSIVE, *, at_once: bool = False
) -> T | None:
    """Look for the object of a put whose answer was lost, and return the result of `look`.

    Returns None if `look` raises one of `unclear` every time. A missing object proves nothing, because the put may
    still arrive. Pauses before the first look unless `at_once`.
    """
    for pause in (0.0, *READ_BACK_PAUSES_SECONDS) if at_once else READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        with suppress(*unclear):
            return look()
    return None


def _is_there(store: ObjectStore, key: str, body: bytes) -> bool:
    return store.size(key) == len(body) and store.digest(key) == digest(body)
