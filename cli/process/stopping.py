"""How this process is stopped: by signals, also where Python would handle them late, and from elsewhere.

Python runs a signal's handler in the main thread, between two instructions. If a signal comes after the last one before
a call that waits, nothing interrupts that call: the handler runs when it ends, which may take an hour. And an interrupt
that a handler raises in a finalizer, or in the callback of a weak reference, goes no further: Python shows it and
continues.

So each signal also tells a thread, which nudges the main thread until that has run all handlers. A nudge raises the
interrupt that was lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from cutline.storage.waits import hurry, stop_hurrying

if TYPE_CHECKING:
    from cutline.snapshots.records.operation_records import CancelRequest

# Ignored where it has no handler. Its number is higher than those of the signals that end a command: Python runs the
# handlers in that order, so theirs have run when its own has.
NUDGE = signal.SIGURG
NUDGE_SECONDS = 0.2

_lost: list[KeyboardInterrupt] = []
# How many nudges were handled. No Event: one handler may interrupt another, and would wait for its lock for ever.
_handled = 0


def nudge_until_handled() -> None:
    """From now on each signal is handled within about NUDGE_SECONDS, unless a call can't be interrupted."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    before = sys.unraisablehook

    def keep_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
            before(unraisable)
            return
        # A new exception: the traceback of the other holds the object that is being finalized.
        _lost.append(KeyboardInterrupt(*error.args))
        os.write(tell, bytes([signal.SIGTERM]))

    sys.unraisablehook = keep_interrupt
    signal.signal(NUDGE, _handle_nudge)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_nudge, args=[told], name="nudge", daemon=True).start()


def _nudge(told: int) -> None:
    main = threading.main_thread().ident or 0
    while numbers := os.read(told, 1024):
        if set(numbers) == {NUDGE}:
            continue
        time.sleep(NUDGE_SECONDS)
        handled = _handled
        while handled == _handled:
            signal.pthread_kill(main, NUDGE)
            time.sleep(NUDGE_SECONDS)


def _handle_nudge(_number: int, _frame: object) -> None:
    global _handled
    _handled += 1
    if _lost:
        raise _lost.pop()


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
    """Note that a signal has stopped this process: a request must not interrupt its cleanup.

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
    # Sent to the thread, so that the call in which it waits is interrupted.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def is_signalled() -> bool:
    """Whether a signal has stopped this process that no request was behind."""
    return _is_signalled.is_set()


def cancel_request() -> CancelRequest | None:
    """The request that has stopped this process; None if there was none."""
    return _requests[0] if _requests else None


def is_asked_to_stop(operation: str) -> bool:
    """Whether somebody has asked this operation of the process to stop."""
    return any(request.operation == operation for request in _requests)


def forget_requests(*, kept: str) -> None:
    """Go on after a request has stopped one of several operations of this process; those to `kept` stay."""
    # From here on another request interrupts.
    _is_stopping.clear()
    stop_hurrying()
    _requests[:] = [request for request in _requests if request.operation == kept]


def owner_text(label: str) -> str:
    """`user@host` of a label."""
    # Imported here: `snapshot --help` imports this module.
    from cutline.fleet.own_process import read_label

    owner = read_label(label)
    return f"{owner.user}@{owner.host}" if owner else "an unknown user"
