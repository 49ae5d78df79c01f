"""The failure report as JSON and as a page: for programs, and for somebody to whom it is sent."""

import json
import re
from html.parser import HTMLParser
from signal import SIGINT, SIGKILL

import pytest

from hvlaunch.errors import BadUsage, HostLost
from hvlaunch.gloo.reporting import check_report_path, write_report
from hvlaunch.job import JobResult
from hvlaunch.report.failure_report import Memory, Missing, RoundFailure, Survivors, make_report
from hvlaunch.report.forms import as_html, as_json
from tests.unit.report.reports import ended, stopped, worker

GIB = 1 << 30
ABOUT = {"id": "0123456789ab", "name": None, "command": ["train", "--api-key", "hunter2"], "began": 1.0}
GLOO = b"RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:31337\n"
OOM = b"Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
HOSTILE = (
    "</pre><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>"
    '" style="x" \u202emoc.live\u2066 \x1b[2J\x00 &amp; https://user:pass@evil.example/ \ud800'
)


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def form(result, tails=None, size=4, **options):
    made = as_json(make_report(result, tails or {}, size, about=ABOUT, ended=9.0, **options))
    assert json.loads(json.dumps(made)) == made
    return made


def test_each_worker_has_its_part_in_the_failure():
    found = form(
        ended(
            worker(0, "a", code=1, when=2.0),
            worker(1, "b", code=1, when=2.1, look="consequence"),
            *stopped(2),
            never_started=(3,),
        ),
        {1: GLOO},
        size=5,
    )
    roles = {one["rank"]: one["role"] for one in found["workers"]}
    assert roles == {0: "cause", 1: "consequence", 2: "stopped", 3: "never started", 4: "unknown"}
    assert (found["outcome"], found["cause"]["rank"], found["cause"]["host"]) == ("failed", 0, "a")
    assert found["text"].startswith("hvlaunch: rank 0 of 5 on host a failed first")


@pytest.mark.parametrize(
    ("facts", "tail", "kind"),
    [
        ({"code": 3}, b"", "exit code"),
        ({"code": 1}, b"Traceback (most recent call last):\nValueError: bad\n", "exception"),
        ({"signal": 11}, b"ModuleNotFoundError: No module named 'x', but it went on\n", "signal"),
        ({"signal": SIGKILL, "oom_killed": True}, b"", "host memory"),
        ({"code": 1}, OOM, "gpu memory"),
        ({"code": 1}, b"Traceback (most recent call last):\nMemoryError\n", "host memory"),
        ({"code": 1}, b"python: No module named foo\n", "missing module"),
        ({"code": 2}, b"python: can't open file '/x/t.py': [Errno 2] No such file\n", "missing file"),
        ({"code": 1}, b"OSError: [Errno 28] No space left on device\n", "disk full"),
        ({"code": 1}, b"Watchdog caught collective operation timeout: WorkNCCL\n", "timeout"),
        ({"code": 1}, b"RuntimeError: NCCL operation timed out\n", "timeout"),
        ({"code": 1}, b"RuntimeError: NCCL AllReduce failed timed out after 600000 ms\n", "timeout"),
        ({"code": 1}, GLOO, "lost connection"),
        ({"code": 127}, b"", "not started"),
        ({"code": 1, "port_taken_by": 7}, b"", "port taken"),
    ],
)
def test_the_kind_of_a_failure(facts, tail, kind):
    assert form(ended(worker(0, **facts)), {0: tail})["cause"]["kind"] == kind


def test_every_outcome_has_a_report():
    assert form(JobResult(exit_code=0, elapsed=1.0))["outcome"] == "well"
    assert form(JobResult(exit_code=130, elapsed=1.0, interrupted=SIGINT))["interrupted"] == "SIGINT"
    lost = form(JobResult(exit_code=69, elapsed=1.0, error=HostLost("gone", host="b").problem))
    assert (lost["outcome"], lost["error"]["host"], lost["cause"]) == ("error", "b", None)


def test_memory_and_missing_files_are_reported_if_they_explain_the_failure():
    memory = [Memory("GPU 0 of host a", 79 * GIB, 80 * GIB, -0.5)]
    missing = Missing("module", "foo", ("b", "c"), ())
    failed = ended(worker(0, code=1, when=2.0))
    for tail, has_memory in ((OOM, True), (b"ModuleNotFoundError: No module named 'foo'\n", False)):
        found = form(failed, {0: tail}, memory=memory, missing=missing)
        assert bool(found["cause"]["memory"]) is has_memory
        assert bool(found["cause"]["missing"]) is not has_memory
        told = (
            "GPU 0 of host a had 79.0 of 80.0 GiB in use, 0.5 s earlier."
            if has_memory
            else "host a lacks the module foo; hosts b and c have it."
        )
        assert f"\n  {told}\n" in found["text"]


def hostile():
    rounds = [RoundFailure(0, 2, (HOSTILE,), 1.0, HOSTILE, ())]
    failed = ended(worker(0, HOSTILE, code=1, when=2.0), *stopped(1))
    before = Survivors((((1,), HOSTILE),), (HOSTILE,), (HOSTILE,), HOSTILE)
    tail = {0: HOSTILE.encode(errors="replace")}
    missing = Missing("module", HOSTILE, (HOSTILE,), ())
    return form(failed, tail, before_kill=before, rounds=rounds, missing=missing)


def test_text_of_workers_and_hosts_is_text_alone_on_the_page():
    text = as_html(hostile())
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "dl", "dt", "dd"),
        *("p", "pre", "strong", "details", "summary", "div", "table", "thead", "tbody", "tr", "th", "td"),
        "footer",
    }
    shown = {"class", "tabindex", "lang", "charset", "name", "content", "http-equiv"}
    assert {name for _, attributes in page.tags for name in attributes} <= shown
    assert "<script>alert(1)</script>" in "".join(page.texts)
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert text.encode()


def test_the_page_loads_nothing_from_elsewhere():
    text = as_html(hostile())
    [policy] = [
        attributes["content"]
        for tag, attributes in Page(text).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'")
    [style] = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style


def test_files_mask_probable_secrets():
    tail = b"Traceback (most recent call last):\nValueError: no access with token=hunter2-hunter2\n"
    found = form(ended(worker(0, code=1)), {0: tail})
    for text in (json.dumps(found), as_html(found)):
        assert "hunter2" not in text
        assert "****" in text


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_a_file_is_replaced_as_a_whole(tmp_path, suffix):
    path = tmp_path / f"report{suffix}"
    path.write_text("old")
    check_report_path(path)
    assert path.read_text() == "old"
    write_report(path, make_report(JobResult(exit_code=0, elapsed=1.0), {}, 1, about=ABOUT))
    assert "ended well" in path.read_text() or json.loads(path.read_text())["outcome"] == "well"
    assert [*tmp_path.iterdir()] == [path]


def test_an_unwritable_path_is_reported_before_the_job(tmp_path):
    (tmp_path / "directory.json").mkdir()
    for name, cause in (("no/x.json", "no such file or directory"), ("directory.json", "it is no file")):
        with pytest.raises(BadUsage, match=cause):
            check_report_path(tmp_path / name)


def test_a_failed_write_leaves_no_file(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_report(tmp_path / "x.json", make_report(JobResult(exit_code=0, elapsed=1.0), {}, 1))
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]
