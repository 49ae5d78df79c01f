"""Classification of workers' last words, with lines of real failures of the frameworks."""

import json

import pytest

from hvlaunch.report.evidence import look

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
