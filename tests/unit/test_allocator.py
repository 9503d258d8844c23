"""Freed memory is used again, by every thread, instead of being cleared by the kernel once more."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

BEGIN = """
import resource, sys, threading
from cutline.columns.allocator import keep_memory

def use(sizes):
    blocks = [bytearray(size << 20) for size in sizes]
    del blocks

if sys.argv[1] == "kept":
    keep_memory()
"""
# Three threads that allocate and free blocks again and again, as those that read objects do.
AGAIN = f"""{BEGIN}
def work():
    for _ in range(20):
        use((9, 12, 15, 18))

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
# Three threads that have allocated a block; what glibc says about their arenas.
ARENAS = f"""{BEGIN}
import ctypes

barrier = threading.Barrier(4)

def work():
    block = bytearray(50_000)
    barrier.wait()
    barrier.wait()

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
barrier.wait()
ctypes.CDLL(None).malloc_stats()
barrier.wait()
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is tuned")


def run(program: str, what: str, **more: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return subprocess.run(
        [sys.executable, "-c", program, what], env=own | more, capture_output=True, text=True, check=True
    )


def page_faults(what: str, **more: str) -> int:
    return int(run(AGAIN, what, **more).stdout)


def test_freed_memory_is_kept_unless_the_user_tunes_it() -> None:
    returned = page_faults("returned")
    assert page_faults("kept") * 4 < returned
    assert page_faults("kept", GLIBC_TUNABLES="glibc.cpu.x86_ibt=off") * 4 < returned
    assert page_faults("kept", MALLOC_ARENA_MAX="8") * 4 > returned
    assert page_faults("kept", GLIBC_TUNABLES="glibc.malloc.arena_max=8") * 4 > returned


def test_all_threads_share_one_arena() -> None:
    assert run(ARENAS, "kept").stderr.count("\nArena ") + 1 == 1
    assert run(ARENAS, "returned").stderr.count("\nArena ") + 1 > 1
