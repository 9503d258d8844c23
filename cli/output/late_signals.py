"""Signals interrupt the main thread also where Python would handle them late, or lose the interrupt.

Python runs a signal's handler in the main thread, between two instructions. If a signal comes after the last one before
a call that waits, nothing interrupts that call: the handler runs when it ends, which may take an hour. And an interrupt
that a handler raises in a finalizer, or in the callback of a weak reference, goes no further: Python shows it and goes
on.

So each signal also tells a thread, which nudges the main thread until that has run all handlers. A nudge raises the
interrupt that was lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

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
        # A new one: the traceback of the other holds what is being finalized.
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
