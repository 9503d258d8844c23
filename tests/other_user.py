"""Acting as another user of the machine, the adversary of a test; only root can do that."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Neither root nor an account that runs servers (nodes/programs.py); it needs no entry in the password file.
OTHER_UID = 64_999

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_other_user(act: Callable[[], Any], results: Path) -> Any:
    """Call `act` in a process of another user, without groups; return its result, which is written to `results`.

    It is forked: the other user may be unable to read this Python.
    """
    descriptor = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
            os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
            os.write(descriptor, json.dumps(act()).encode())
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(descriptor)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the other user's process failed; its traceback is in the output"
    return json.loads(results.read_text())
