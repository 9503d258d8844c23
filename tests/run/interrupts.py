"""Let an interrupted run stop everything that its tests have started: fixtures stop servers, which takes time.

The workers of xdist are interrupted twice: by Ctrl-C, if it comes from a terminal, and a few seconds later by execnet,
which kills a worker ten seconds after that.
"""

from __future__ import annotations

import os
import signal

import pytest

END_SECONDS_MAX = 60


def pytest_configure(config: pytest.Config) -> None:
    """Handle signals that the parent process ignores, as nohup and shells do for background processes.

    Commands inherit ignored signals, but no handlers.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if config.pluginmanager.hasplugin("xdist"):
        from xdist.workermanage import NodeManager

        # Longer than execnet's default, which would kill workers while they stop their servers.
        NodeManager.EXIT_TIMEOUT = END_SECONDS_MAX


def pytest_keyboard_interrupt() -> None:
    """Ignore further interrupts in an xdist worker, while its fixtures end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
