"""Freed memory is used again, in every thread, instead of being cleared by the kernel once more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Three threads that allocate and free blocks again and again, as those that read objects do.
PROGRAM = """
import resource, sys, threading
from cutline.columns.allocator import keep_memory

def work():
    for _ in range(20):
        blocks = [bytearray(size << 20) for size in (9, 12, 15, 18)]
        del blocks

if sys.argv[1] == "kept":
    keep_memory()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def page_faults(what: str, **more: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], env=own | more, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else True, reason="not glibc")
def test_freed_memory_is_kept_unless_the_user_tunes_it() -> None:
    returned = page_faults("returned")
    assert page_faults("kept") * 3 < returned
    assert page_faults("kept", MALLOC_ARENA_MAX="8") * 3 > returned
