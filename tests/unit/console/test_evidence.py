import json

import pytest

from hvlaunch.console.printer import TAIL
from hvlaunch.job import WorkerExit
from hvlaunch.report.evidence import find_evidence

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
