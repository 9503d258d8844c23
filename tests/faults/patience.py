"""How soon a command gives up while a fault lasts: early, but not before a busy machine has answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import cutline.nodes.watch
import cutline.storage.storing

# For the store's options in a fleet.toml. More attempts make no difference while the fault lasts. Of a busy machine an
# answer may take a second, and the probe of `init` must not fail for that.
IMPATIENT = "[store_options.config_kwargs]\nread_timeout = 3\nconnect_timeout = 3\nretries = { total_max_attempts = 2 }"


@contextmanager
def impatient() -> Iterator[pytest.MonkeyPatch]:
    """Give up early on a silent node, but not during the pause that a fault causes; read back at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {"PROBE_SECONDS": 0.5, "ANSWER_SECONDS_MAX": 2.0, "SILENCE_SECONDS_MAX": 4.0}.items():
            patch.setattr(cutline.nodes.watch, name, seconds)
        patch.setattr(cutline.storage.storing, "READ_BACK_PAUSES_SECONDS", (0.05, 0.1))
        yield patch
