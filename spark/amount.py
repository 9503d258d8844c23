"""How much work a command's jobs have, and whether the command runs their tasks itself."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.fleet.config import has_executors
from cutline.storage.location import S3_PROTOCOLS, StoreLocation

# Up to this amount, threads of the command take less time than the start of the JVM and its workers (measured on two
# cores: a third to two thirds of the time with a million rows in 300 MB).
PAGE_BYTES_MAX, ROWS_MAX = 256 << 20, 1_500_000
# An interrupt can't end a task's requests to other stores.
FOLDERS = ("file", "local")


@dataclass(frozen=True, slots=True)
class Amount:
    """About how much work a command's jobs have.

    `page_bytes` counts the pages of tables, or what stored rows would take in pages; None if that is unknown. `rows`
    counts the rows and changes in stored objects. `changes` counts those that Spark may have to shuffle.
    """

    page_bytes: int | None = None
    rows: int = 0
    changes: int = 0

    def __add__(self, other: Amount) -> Amount:
        size = None if self.page_bytes is None or other.page_bytes is None else self.page_bytes + other.page_bytes
        return Amount(size, self.rows + other.rows, self.changes + other.changes)


def is_for_command(amount: Amount, master: str, store: StoreLocation) -> bool:
    """Whether the command runs the tasks itself: a small amount, no executors, and a store in a folder or on S3."""
    protocol, separator, _ = store.url.partition("://")
    is_stoppable = not separator or protocol in FOLDERS or protocol in S3_PROTOCOLS
    is_small = amount.page_bytes is not None and amount.page_bytes <= PAGE_BYTES_MAX and amount.rows <= ROWS_MAX
    return is_small and is_stoppable and not has_executors(master)
