"""The location of a store: its URL and options, as in fleet.toml and as sent to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.open import open_store
from storage.store import ObjectStore, redact_url


@dataclass(frozen=True, slots=True, repr=False)
class StoreLocation:
    """A store's URL and its options, which may contain secrets.

    It can be pickled; an open store can't. str() and repr() show only the URL without credentials.
    """

    url: str
    options: Mapping[str, object] = field(default_factory=dict)

    def open(self) -> ObjectStore:
        """Open the store without contacting it. In one process the same location always gives the same store.

        Raises StoreUrlError.
        """
        return open_store(self.url, self.options)

    def __str__(self) -> str:
        return redact_url(self.url)

    def __repr__(self) -> str:
        return f"StoreLocation({redact_url(self.url)!r})"
