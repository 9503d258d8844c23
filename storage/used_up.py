"""The error of a command whose process lacks something, in the place of the one that it met."""

from __future__ import annotations

from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from cutline.storage.open_files import OpenFilesError, is_used_up
from cutline.storage.process_memory import TooLittleMemoryError, lacks_memory


def find_used_up(error: BaseException) -> UnreachableError | None:
    """The error to report if open files or memory are used up, whatever was taken for the reason where that was met.

    None also if `error` says what has happened besides, such as that a commit may be stored.
    """
    is_own = isinstance(error, SnapshotError)
    if is_used_up(error) and (not is_own or isinstance(error, (UnreachableError, RefusedError))):
        reason = error.message if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"
        return OpenFilesError(reason, error.details if isinstance(error, SnapshotError) else None)
    return TooLittleMemoryError(str(error)) if not is_own and lacks_memory(error) else None
