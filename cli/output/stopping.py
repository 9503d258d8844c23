"""How this process is stopped from elsewhere: as by SIGTERM, and who has asked for it."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from cutline.storage.waits import hurry, stop_hurrying

if TYPE_CHECKING:
    from cutline.snapshots.records.operation_records import CancelRequest


class _Flag:
    """As threading.Event, without its lock: a signal's handler that interrupts another would wait for it for ever."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set


_requests: list[CancelRequest] = []
_is_stopping = _Flag()
# Whether stop_process has sent a signal that has not been handled yet; whether one came from elsewhere.
_is_sent, _is_signalled = _Flag(), _Flag()


def begin_stopping() -> bool:
    """Note that a signal has stopped this process: what it cleans up is not to be interrupted by a request.

    Returns whether a request is behind the signal.
    """
    is_requested = _is_sent.is_set()
    if is_requested:
        _is_sent.clear()
    else:
        _is_signalled.set()
    _is_stopping.set()
    hurry()
    return is_requested


def stop_process(request: CancelRequest) -> None:
    """Stop the main thread as SIGTERM does, unless a signal has stopped it; called from any thread."""
    _requests.append(request)
    if _is_stopping.is_set():
        return
    _is_sent.set()
    # Sent to the thread, so that what it waits for is interrupted.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def is_signalled() -> bool:
    """Whether a signal has stopped this process that no request was behind."""
    return _is_signalled.is_set()


def cancel_request() -> CancelRequest | None:
    """The request that has stopped this process; None if there was none."""
    return _requests[0] if _requests else None


def is_asked_to_stop(operation: str) -> bool:
    """Whether somebody has asked this operation of the process to stop."""
    return any(one.operation == operation for one in _requests)


def forget_requests(*, kept: str) -> None:
    """Go on after a request has stopped one of several operations of this process; those to `kept` stay."""
    # From here on another request interrupts.
    _is_stopping.clear()
    stop_hurrying()
    _requests[:] = [one for one in _requests if one.operation == kept]


def owner_text(label: str) -> str:
    """`user@host` of a label."""
    # Imported here: `snapshot --help` imports this module.
    from cutline.fleet.label import read_label

    owner = read_label(label)
    return f"{owner.user}@{owner.host}" if owner else "an unknown user"
