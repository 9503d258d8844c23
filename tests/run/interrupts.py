"""An interrupted run ends what its tests have started: servers are stopped by fixtures, which take their time.

xdist's processes are told twice: by Ctrl-C, if it comes from a terminal, and a few seconds later by execnet, which
ends a process ten seconds after that.
"""

from __future__ import annotations

import os
import signal

import pytest

END_SECONDS_MAX = 60


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C even where a shell has started the tests in the background, deaf to it: commands inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("xdist"):
        from xdist.workermanage import NodeManager

        # Longer than execnet gives them, or they are killed while they stop their servers.
        NodeManager.EXIT_TIMEOUT = END_SECONDS_MAX


def pytest_keyboard_interrupt() -> None:
    """Let nothing interrupt the fixtures in a process of xdist's, which end now."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
