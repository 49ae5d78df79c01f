from signal import SIGABRT, SIGBUS, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1

import pytest

from hvlaunch.job import WorkerExit
from hvlaunch.report.diagnosis import advice, start_advice
from hvlaunch.report.evidence import Evidence


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
        ("python: can't open file '/etc/passwd': [Errno 2] No such file or directory", "on b too"),
        ("RuntimeError: HTTP request failed. PUT /global/rank_0: 401", "--horovod"),
        ("RuntimeError: CUDA error: invalid device ordinal", "LOCAL_RANK"),
        (
            "NCCL Last Error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device b3000",
            "LOCAL_RANK",
        ),
        (
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
            "-x CUDA_LAUNCH_BLOCKING=1",
        ),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "--exclude b"),
        (
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "who else uses the GPU",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "on b"),
        ("RuntimeError: DataLoader worker (pid(s) 207) exited unexpectedly", "num_workers=0"),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. … out of shared memory.",
            "/dev/shm on b",
        ),
        (
            "ValueError: … in Lightning, but the product (1 * 1) does not match the world size (4).",
            "num_nodes",
        ),
    ],
)
def test_advice_by_the_last_words(line, word):
    assert word in hint(line, code=1)


def test_the_last_thing_said_counts():
    assert "df -h" in hint("ImportError: no flash_attn, going on without", "No space left on device", code=1)


def test_no_advice_for_unknown_errors():
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


def test_an_abort_is_explained_by_its_last_words():
    assert "free -h" in hint(
        "terminate called after throwing an instance of 'std::bad_alloc'", signal=SIGABRT
    )


def test_an_abort_as_python_ends_is_torchs():
    assert "docs/guides/frameworks.md" in hint("terminate called without an active exception", signal=SIGABRT)


def test_a_command_that_the_kernel_does_not_start():
    worker = WorkerExit(rank=0, host="b", code=126, not_started="/bin/sh: resource temporarily unavailable")
    assert "ulimit -u" in (start_advice(worker) or "")


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (
            "train: command not found (PATH=/usr/bin)",
            "check the spelling; a program outside PATH needs its path",
        ),
        ("tool: command not found (PATH=/usr/bin)", "./tool"),
        ("./train.py: command not found", "python ./train.py, if that host has the file"),
        ("FOO=1: command not found (PATH=/usr/bin)", "-x FOO=1"),
        (
            "python: command not found (PATH=/usr/bin)",
            "install it on that host too (on this machine it is /opt/train/bin/python)",
        ),
        ("/opt/train/bin/python: command not found", "install it on that host too, under the same path"),
        ("./train: command not found", "check the path; a relative one starts at the working directory"),
        ("./my train.py: command not found (PATH=/usr/bin)", "separate words"),
        ("python train.py --lr 0.1: command not found (PATH=/usr/bin:/a b)", "separate words"),
    ],
)
def test_a_command_that_is_not_found(cause, word):
    here = dict.fromkeys(("python", "/opt/train/bin/python", "./tool"), "/opt/train/bin/python")
    worker = WorkerExit(rank=0, host="b", code=127, not_started=cause)
    assert word in (start_advice(worker, here.get) or "")


@pytest.mark.parametrize(
    "line",
    [
        "python: can't open file '/data/train.py': [Errno 2] No such file or directory",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.py'",
        "cat: /data/train.py: No such file or directory",
    ],
)
def test_a_file_missing_here_too_is_not_missing_on_one_host(line):
    worker = WorkerExit(rank=0, host="b", code=2)
    here = advice(worker, said(line), exists=lambda path: path == "/data/train.py")
    nowhere = advice(worker, said(line), exists=lambda _: False)
    assert (here or "").startswith("the file must be on b too")
    assert (nowhere or "").startswith("check the path")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("python: can't open file 'train.py': [Errno 2] No such file or directory", "--cwd"),
        ("ModuleNotFoundError: No module named 'torch'", "install what is missing in"),
    ],
)
def test_this_machine_need_not_be_like_another(line, word):
    advised = advice(WorkerExit(rank=0, host="localhost", code=1), said(line))
    assert advised is not None
    assert word in advised
    assert "too" not in advised


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
        ("RuntimeError: NCCL AllReduce failed timed out after 600000 ms", True),
        ("RuntimeError: Failed to initialize NCCL communicator: unhandled system error", True),
        ("ValueError: connection is not a number", False),
    ],
)
def test_lost_connections(line, lost):
    assert said(line).has_lost_connection is lost


def test_a_warning_before_a_traceback_is_no_lost_connection():
    assert not said(
        "connection refused, trying again",
        "Traceback (most recent call last):",
        '  File "t.py"',
        "ValueError: x",
    ).has_lost_connection
