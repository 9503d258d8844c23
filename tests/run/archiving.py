"""Let Spark archive the WAL of every cut, as if there were much of it: else the command does so by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cutline.wal.drain.lags


def archive_by_spark() -> None:
    """Let no WAL be little, in this process."""
    cutline.wal.drain.lags.LITTLE_BYTES = -1


@contextmanager
def archiving_by_spark(*, wanted: bool = True) -> Iterator[None]:
    """Let no WAL be little while the block runs, if that is wanted."""
    before = cutline.wal.drain.lags.LITTLE_BYTES
    try:
        if wanted:
            archive_by_spark()
        yield
    finally:
        cutline.wal.drain.lags.LITTLE_BYTES = before
