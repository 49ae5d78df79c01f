"""Evidence of a failure, and the classification of workers' last words, with lines of real failures of the frameworks."""

import json

import pytest

from hvlaunch.console.printer import TAIL
from hvlaunch.job import WorkerExit
from hvlaunch.report.evidence import find_evidence, look

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nOSError: no'


def from_tail(tail):
    return find_evidence(WorkerExit(rank=0, host="a", code=1), tail)


def from_file(text):
    return find_evidence(WorkerExit(rank=0, host="a", code=1, error_file=text), b"not this\n")


@pytest.mark.parametrize(
    ("text", "kind", "lines"),
    [
        (
            json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": TRACEBACK}}}),
            "traceback",
            TRACEBACK,
        ),
        (json.dumps({"message": TRACEBACK}), "traceback", TRACEBACK),
        (json.dumps({"message": {"message": "m"}}), "error file", "m"),
        (json.dumps({"message": {"message": "m", "extraInfo": None}}), "error file", "m"),
        (json.dumps({"message": "just text\nof two lines"}), "error file", "just text\nof two lines"),
        ('{"message": 3}', "error file", '{"message": 3}'),
        ('{"message": {"other": 1}}', "error file", '{"message": {"other": 1}}'),
        ("[1]", "error file", "[1]"),
        ('{"message": "cut of', "error file", '{"message": "cut of'),
        ("[" * 100_000, "error file", "[" * 1000 + "…"),
    ],
)
def test_error_files(text, kind, lines):
    found = from_file(text)
    assert (found.kind, "\n".join(found.lines)) == (kind, lines)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_an_empty_error_file_says_nothing(text):
    assert from_file(text).lines == ("not this",)


def test_the_last_lines():
    tail = b"".join(b"line %d\n" % number for number in range(100)) + b"no end"
    found = from_tail(tail)
    assert found.kind == "last lines of stderr"
    assert found.lines == (*(f"line {number}" for number in range(81, 100)), "no end")
    assert from_tail(b"").lines == ()
    assert from_tail(b"\n \n").lines == ()


def test_a_traceback_is_not_cut():
    frames = "".join(f'  File "t.py", line {number}, in f\n' for number in range(30))
    tail = f"before\nTraceback (most recent call last):\n{frames}ValueError: bad\n"
    lines = from_tail(tail.encode()).lines
    assert (lines[0], len(lines)) == ("Traceback (most recent call last):", 32)


def test_a_very_long_traceback_keeps_its_first_and_last_lines():
    frames = "".join(f'  File "t.py", line {number}, in f\n' for number in range(200))
    lines = from_tail(f"Traceback (most recent call last):\n{frames}ValueError: bad\n".encode()).lines
    assert lines[:2] == ("Traceback (most recent call last):", '  File "t.py", line 0, in f')
    assert lines[3:5] == ("(143 lines left out)", '  File "t.py", line 145, in f')
    assert (lines[-1], len(lines)) == ("ValueError: bad", 60)


def chained(*frames):
    """Exceptions `error 0`, `error 1`, … each raised from the one before it, with so many frames."""
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    return link.join(
        "Traceback (most recent call last):\n"
        + '  File "t.py", line 1, in f\n' * count
        + f"Error: error {number}\n"
        for number, count in enumerate(frames)
    )


def test_the_causes_of_an_exception_are_quoted():
    text = chained(20, 20)
    assert from_tail(f"noise\n{text}".encode()).lines == tuple(text.rstrip().split("\n"))
    link = "The above exception was the direct cause of the following exception:"
    for other in (
        "During handling of the above exception, another exception occurred:",
        "-- Process 1 terminated with the following error:",
    ):
        changed = text.replace(link, other)
        assert from_tail(changed.encode()).lines == tuple(changed.rstrip().split("\n"))
    assert len(from_tail(text.replace(link, "Again:").encode()).lines) == 22


def test_a_long_chain_keeps_the_exceptions():
    lines = from_tail(chained(40, 30, 50).encode()).lines
    assert lines[:3] == ("Traceback (most recent call last):", "  (40 lines left out)", "Error: error 0")
    assert "Error: error 1" in lines
    assert (lines[-1], len(lines)) == ("Error: error 2", 60)
    assert from_tail(chained(40, 30, 50).encode()).verdict[-1] == "Error: error 2"
    assert from_tail(chained(20, 20).encode()).verdict == ("Error: error 1",)
    many = from_tail(chained(*[3] * 40).encode()).lines
    assert (many[2], many[-1], len(many)) == ("Error: error 0", "Error: error 39", 35)


def test_a_line_cut_by_the_tail_is_left_out():
    tail = (b"x" * 5000 + b"\n" + b"last\n" * 10_000)[:TAIL]
    assert tail.startswith(b"x")
    assert from_tail(tail[-TAIL:]).lines[0] == "last"
    assert from_tail(b"y" * TAIL).lines == ("y" * 1000 + "…",)


def test_control_sequences_are_not_quoted():
    tail = b"\x1b[31mred\x1b[0m\n\x1b]0;title\x07 10%\r 20%\r\nbell\x07\tcaf\xc3\xa9 \xff\n"
    assert from_tail(tail).lines == ("red", " 20%", "bell\tcafé \ufffd")


def test_frames_of_cxx_code_do_not_crowd_out_the_message():
    frames = b"".join(b"frame #%d: c10::Error + 0x5 (0x7f in libc10.so)\n" % number for number in range(40))
    tail = (
        b"RuntimeError: NCCL error\nException raised from x (most recent call first):\n" + frames + b"\nend\n"
    )
    assert from_tail(tail).lines == (
        "RuntimeError: NCCL error",
        "Exception raised from x (most recent call first):",
        "(40 C++ frames)",
        "",
        "end",
    )


def test_torchs_own_prefix_is_taken_off():
    tail = b"".join(b"[rank3]: %s\n" % line.encode() for line in TRACEBACK.split("\n"))
    assert from_tail(tail).lines == tuple(TRACEBACK.split("\n"))


def test_warnings_at_the_end_of_a_process_are_left_out():
    """As torch 2.11 writes it on a GPU."""
    text = (
        "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0], thread: [0,0,0] Assertion failed.\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 19, in <module>\n'
        "[rank1]:     print(table[index].item())\n"
        "[rank1]: torch.AcceleratorError: CUDA error: device-side assert triggered\n"
        "[rank1]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "\n"
        "[rank1]:[W1127 01:47:53.572353693 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called\n"
    )
    found = from_tail(text.encode())
    assert found.lines[0].startswith("/pytorch/aten")
    assert found.lines[-1] == "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    assert found.verdict[0] == "torch.AcceleratorError: CUDA error: device-side assert triggered"


def test_a_traceback_is_judged_by_its_exception():
    tail = b"connection refused, trying again\n" + TRACEBACK.encode() + b" such file\nof two lines\n"
    assert from_tail(tail).verdict == ("OSError: no such file", "of two lines")
    assert from_tail(b"one\n  two\n").verdict == ("one", "  two")


FRAMES = '  File "train.py", line 9, in step\n    dist.all_reduce(loss)\n'
OWN = f"Traceback (most recent call last):\n{FRAMES}ValueError: bad learning rate\n"
GLOO = (
    f"Traceback (most recent call last):\n{FRAMES}"
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:11950\n"
)
SHUT_DOWN = (
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of"
    " the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.\n"
)
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
WATCHDOG = (
    "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=808, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f3b6d41df86 in libc10.so)\n"
)
JAX_FATAL = (
    "E1122 14:05:43.206313   21575 coordination_service_agent.cc:289] Polled an error from coordination service (this can"
    " be an error from this or another task).\n"
    "F1122 14:05:43.206340   21575 client.h:80] Terminating process because the JAX distributed service detected fatal"
    " errors. This most likely indicates that another task died; see the other task logs for more details.\n"
    "Additional GRPC error information from remote target coordination_service:\n"
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}\n'
    "*** Check failure stack trace: ***\n    @     0x7fd347e40634  absl::lts_20260107::log_internal::LogMessage::Flush()\n"
)
JAX_GLOO = (
    f"Traceback (most recent call last):\n{FRAMES}"
    "ValueError: UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error"
    " [127.0.0.1]:400: Connection reset by peer\n"
)
NCCL = (
    f"Traceback (most recent call last):\n{FRAMES}"
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, remote process exited or there was a"
    " network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgressOpt: Call to recv from 10.0.0.2<50962> failed : Connection reset by peer\n"
)
NCCL2 = [
    f"Traceback (most recent call last):\n{FRAMES}RuntimeError: {text}\n"
    for text in (
        "NCCL operation timed out",
        "NCCL AllReduce failed timed out after 600000 ms",
        "NCCL Async Error: unhandled system error",
        "NCCL communicator was aborted after a previous error",
        "Work timed out during finalize",
    )
] + [
    "[rank1]:[E1127 06:24:44.9 ProcessGroupNCCL.cpp:616] [TC][rank=1] Aborting process on rank 1 due to timeout\n"
]
NCCL2_START = (
    f"Traceback (most recent call last):\n{FRAMES}"
    "RuntimeError: Failed to initialize NCCL communicator: invalid usage\n"
    "NCCL Last Error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device b3000\n"
)
STORE = (
    f"Traceback (most recent call last):\n{FRAMES}"
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server"
    " shutdown or crash?\n"
)
MPI = (
    "[node12][[17490,1],60][btl_tcp_frag.c:215:mca_btl_tcp_frag_recv] mca_btl_tcp_frag_recv: readv failed: Connection reset"
    " by peer (104)\n"
)
STORE_WARNING = "[W1122 14:02:01.962897 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3): failed to recv, got 0 bytes\n"
BUCKET = f"Traceback (most recent call last):\n{FRAMES}ConnectionResetError: [Errno 104] Connection reset by peer\n"
SIGNAL = f"Traceback (most recent call last):\n{FRAMES}torch.distributed.elastic.SignalException: Process 12 got signal: 15\n"
IGNORED = f"Exception ignored in: <function Loader.__del__ at 0x7f>\n{OWN}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "silent"),
        ("epoch 3\n", "silent"),
        (OWN, "cause"),
        (GLOO, "consequence"),
        (f"[rank0]: {GLOO}".replace("\n", "\n[rank0]: "), "consequence"),
        (NCCL, "consequence"),
        *((text, "consequence") for text in NCCL2),
        (NCCL2_START, "unclear"),
        (WATCHDOG, "consequence"),
        (STORE, "consequence"),
        (SHUT_DOWN, "consequence"),
        (JAX_FATAL, "consequence"),
        (JAX_GLOO, "consequence"),
        (JAX_GLOO + JAX_FATAL, "consequence"),
        (MPI, "consequence"),
        (SIGNAL, "consequence"),
        (OWN + STORE_WARNING, "cause"),
        (OWN + JAX_FATAL, "cause"),
        (OWN + WATCHDOG, "cause"),
        (STORE_WARNING, "silent"),  # of a process that then ended by os._exit()
        (GLOO + HANDLING + OWN, "unclear"),
        (OWN + HANDLING + GLOO, "unclear"),
        (GLOO + HANDLING + STORE, "consequence"),
        (BUCKET, "unclear"),  # of something else, perhaps
        (GLOO + OWN, "cause"),
        (GLOO + IGNORED, "consequence"),
        (IGNORED, "silent"),
        (OWN + "step\n" * 100, "silent"),
        (OWN + "step\n" * 100 + MPI, "consequence"),
    ],
)
def test_last_words(text: str, expected: str) -> None:
    assert look(text.encode(), None, is_urgent=False) == expected


def test_an_urgent_look_trusts_any_traceback() -> None:
    assert look(OWN.encode() + b"step\n" * 100, None, is_urgent=True) == "cause"
    assert look(GLOO.encode(), None, is_urgent=True) == "consequence"


@pytest.mark.parametrize(("text", "expected"), [(OWN, "cause"), (GLOO, "consequence")])
def test_the_error_file_comes_before_stderr(text: str, expected: str) -> None:
    error_file = json.dumps({"message": {"message": "…", "extraInfo": {"py_callstack": text}}})
    other = GLOO if expected == "cause" else OWN
    assert look(other.encode(), error_file, is_urgent=False) == expected
