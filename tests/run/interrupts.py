"""An interrupted run stops what its tests have started: fixtures stop the servers, which takes time.

The workers of xdist are interrupted twice: by Ctrl-C, if it comes from a terminal, and a few seconds later by execnet,
which kills a worker ten seconds after that.
"""

from __future__ import annotations

import os
import signal

import pytest

END_SECONDS_MAX = 60


def pytest_configure(config: pytest.Config) -> None:
    """Handle signals that whoever started the tests ignores, as a shell in the background or nohup does.

    Commands inherit what is ignored, but no handler.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if config.pluginmanager.hasplugin("xdist"):
        from xdist.workermanage import NodeManager

        # Longer than execnet's default, which would kill workers while they stop their servers.
        NodeManager.EXIT_TIMEOUT = END_SECONDS_MAX


def pytest_keyboard_interrupt() -> None:
    """Let nothing interrupt the fixtures of a worker of xdist, which end now."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
