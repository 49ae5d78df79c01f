"""A fork has memory of its own before it writes there."""

import ctypes
import os
import re
import sys
from pathlib import Path

import pytest

from hvlaunch.agent.warm import take_own_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise(2) of Linux")


def shared() -> int:
    """KiB of what this process might have to copy."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"Shared_Dirty: +(\d+)", rollup)[0])


def test_what_is_written_later_is_no_others() -> None:
    page = ctypes.create_string_buffer(4096)
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(ctypes.addressof(page) & ~4095), ctypes.c_size_t(4096), 23):
        pytest.skip("this kernel copies pages only when they are written (Linux 5.14)")
    pid = os.fork()
    if pid == 0:
        before = shared()
        take_own_pages()
        os._exit(0 if before > 1000 and shared() < before / 10 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
