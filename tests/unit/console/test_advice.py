from signal import SIGABRT, SIGBUS, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1

import pytest

from hvlaunch.console.advice import advice, lost_connection
from hvlaunch.console.evidence import Evidence
from hvlaunch.job import WorkerExit


def said(*lines):
    return Evidence("last lines of stderr", lines)


def hint(*lines, **facts):
    return advice(WorkerExit(rank=0, host="b", **facts), said(*lines))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "on b, nvidia-smi"),
        ("MemoryError", "free -h"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "free -h"),
        ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode", "/dev/shm on b"),
        ("OSError: [Errno 28] No space left on device", "df -h on b"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("OSError: [Errno 98] Address already in use", "ss -ltnp on b"),
        ("ModuleNotFoundError: No module named 'torch'", "PYTHONPATH"),
        ("./train: error while loading shared libraries: libx.so", "LD_LIBRARY_PATH"),
        ("python: can't open file '/data/train.py': [Errno 2] No such file or directory", "on b too"),
        ("RuntimeError: CUDA error: invalid device ordinal", "LOCAL_RANK"),
    ],
)
def test_what_it_said(line, word):
    assert word in hint(line, code=1)


def test_the_last_thing_said_counts():
    assert "df -h" in hint("ImportError: no flash_attn, going on without", "No space left on device", code=1)


def test_nothing_is_made_up():
    assert hint("ValueError: bad learning rate", code=1) is None
    assert hint(code=7) is None
    assert hint(signal=SIGUSR1) is None


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (SIGSEGV, "PYTHONFAULTHANDLER"),
        (SIGABRT, "PYTHONFAULTHANDLER"),
        (SIGBUS, "df -h /dev/shm on b"),
        (SIGILL, "CPU of b"),
        (SIGKILL, "dmesg"),
        (SIGTERM, "SIGTERM came from outside"),
        (SIGINT, "SIGINT came from outside"),
        (SIGHUP, "SIGHUP came from outside"),
    ],
)
def test_signals_also_as_a_shell_counts_them(number, word):
    assert word in hint("something", signal=number)
    assert hint("something", code=128 + number) == hint("something", signal=number)


def test_an_abort_is_explained_by_what_it_said():
    assert "free -h" in hint(
        "terminate called after throwing an instance of 'std::bad_alloc'", signal=SIGABRT
    )


def test_the_kernels_word_comes_first():
    assert "fewer workers on b" in hint("CUDA out of memory", signal=SIGKILL, oom_killed=True)


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:31337",
            True,
        ),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exited", True),
        ("torch.distributed.DistNetworkError: The client socket has timed out", True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("ValueError: connection is not a number", False),
    ],
)
def test_lost_connections(line, lost):
    assert lost_connection(said(line)) is lost


def test_a_warning_before_a_traceback_is_no_lost_connection():
    assert not lost_connection(
        said(
            "connection refused, trying again",
            "Traceback (most recent call last):",
            '  File "t.py"',
            "ValueError: x",
        )
    )
