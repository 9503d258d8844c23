"""Stopping this process: by signals, even where Python would handle them late, and by requests from elsewhere.

Python runs a signal's handler in the main thread, between two instructions. If a signal arrives after the last
instruction before a blocking call, nothing interrupts the call: the handler runs when the call returns, which may take
an hour. Also, if a handler raises an interrupt in a finalizer or in the callback of a weak reference, the interrupt is
lost: Python prints it and continues.

So each signal also wakes a thread, which nudges the main thread until it has run all handlers. A nudge raises a lost
interrupt again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from cutline.storage.errors import find_behind
from cutline.storage.waits import hurry, stop_hurrying

if TYPE_CHECKING:
    from cutline.snapshots.records.operation_records import CancelRequest

# This signal is ignored by default. Its number is higher than those of the signals that end a command: Python runs the
# handlers in the order of the numbers, so this handler runs after the others.
NUDGE = signal.SIGURG
NUDGE_SECONDS = 0.2

_lost: list[KeyboardInterrupt] = []
# The number of handled nudges. It is not an Event: a handler that interrupts another would wait for the Event's lock
# forever.
_handled = 0


def nudge_until_handled() -> None:
    """From now on, ensure that each signal is handled within about NUDGE_SECONDS unless a call can't be interrupted."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    before = sys.unraisablehook

    def keep_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
            before(unraisable)
            return
        # Raise a new exception later: this exception's traceback references the object that is being finalized.
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
    """Like threading.Event, but without a lock: a handler that interrupts another would wait for it forever."""

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
# Whether stop_process has sent a signal that has not been handled yet, and whether a signal came from elsewhere.
_is_sent, _is_signalled = _Flag(), _Flag()


def begin_stopping() -> bool:
    """Record that a signal has stopped this process, so that a request does not interrupt its cleanup.

    Returns whether a request caused the signal.
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
    """Stop the main thread as SIGTERM does, unless a signal has already stopped it; may be called from any thread."""
    _requests.append(request)
    if _is_stopping.is_set():
        return
    _is_sent.set()
    # Signal the thread to interrupt the call in which it is waiting.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def is_signalled() -> bool:
    """Whether a signal that no request caused has stopped this process."""
    return _is_signalled.is_set()


def cancel_request() -> CancelRequest | None:
    """Return the request that has stopped this process, or None."""
    return _requests[0] if _requests else None


def is_terminated(error: BaseException) -> bool:
    """Whether SIGTERM, which service managers send, is behind the error; false after a request to stop or Ctrl-C."""
    interrupt = find_behind(error, KeyboardInterrupt)
    return interrupt is not None and interrupt.args == (signal.SIGTERM,) and cancel_request() is None


def is_asked_to_stop(operation: str) -> bool:
    """Whether the process was asked to stop this operation."""
    return any(request.operation == operation for request in _requests)


def forget_requests(*, kept: str) -> None:
    """Continue after a request has stopped one of several operations of this process; keep requests to stop `kept`."""
    # From here on, a new request interrupts again.
    _is_stopping.clear()
    stop_hurrying()
    _requests[:] = [request for request in _requests if request.operation == kept]


def owner_text(label: str) -> str:
    """Return the `user@host` of a label."""
    # Imported here because `snapshot --help` imports this module and must be fast.
    from cutline.fleet.own_process import read_label

    owner = read_label(label)
    return f"{owner.user}@{owner.host}" if owner else "an unknown user"
