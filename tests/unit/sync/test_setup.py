"""The driver's end of --setup: output of hosts, folded, and what becomes of errors. The errand itself is tests/unit/agent/test_setup.py's."""

import json
import threading
import time
from typing import Any

import pytest

from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.driver.links.host_link import in_thread
from hvlaunch.engine.events import HostFacts, WorkerPackages
from hvlaunch.errors import HostError
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SetupOptions, SyncOptions
from hvlaunch.sync.setup import Setup
from tests.testhosts.places import wait_until
from tests.unit.gloo.history import facts

DONE = {"code": 0, "is_new": True, "environment": None, "packages": None}


class PlayedErrand:
    """An errand that has these bytes on its stream, then this result, once it is let go."""

    def __init__(self, stream: bytes, result: Any) -> None:
        self._stream = [stream[:7], stream[7:]]
        self._result = result
        self.may_end = threading.Event()
        self.is_stopped = False

    def read(self, timeout: float) -> bytes | None:
        if self._stream:
            return self._stream.pop(0) or None
        return b"" if self.may_end.wait(timeout) else None

    def wait(self, _: float) -> bool:
        return True

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def stop(self) -> None:
        self.is_stopped = True


class PlayedLink:
    """A link to a host with one errand."""

    def __init__(self, name: str, errand: PlayedErrand) -> None:
        self.host = Host(name)
        self.errands = self
        self.errand = errand
        self.arguments: dict[str, Any] = {}
        self.stages: list[str] = []

    def start(self, name: str, arguments: dict[str, Any], limits: Any) -> PlayedErrand:
        assert (name, limits.seconds) == ("setup", None)
        self.arguments = arguments
        return self.errand

    def tell_preparing(self, stage: str) -> None:
        self.stages.append(stage)


class Site:
    """A setup, and hosts on which it runs."""

    def __init__(self, **options: Any) -> None:
        self.said: list[str] = []
        self.ready: dict[str, HostFacts] = {}
        self.failed: dict[str, HostError] = {}
        spec = JobSpec(command=("python", "train.py"), hosts=(Host("a"), Host("b")), cwd="/w", **options)
        self.setup = Setup(spec, SetupOptions(("make",), ("*.lock",)), self.said.append)

    def begin(self, name: str, stream: str, result: Any = DONE, about: HostFacts | None = None) -> PlayedLink:
        link = PlayedLink(name, PlayedErrand(stream.encode(), result))
        in_thread(self.setup.set_up, "setup")(
            link,  # type: ignore[arg-type]
            about or facts(1),
            lambda more: self.ready.update({name: more}),
            lambda error: self.failed.update({name: error}),
        )
        return link

    def end(self, *links: PlayedLink) -> None:
        for link in links:
            link.errand.may_end.set()
        wait_until(lambda: len(self.ready) + len(self.failed) == len(links), "all hosts")


def lines(*texts: str) -> str:
    return "".join(f"line {json.dumps(text)}\n" for text in texts)


def test_equal_lines_of_hosts_are_shown_once() -> None:
    site = Site()
    first = site.begin("n1", lines("one", "two", "\x1b[2Jthree"))
    second = site.begin("n2", lines("one", "two", "three"))
    wait_until(lambda: len(site.said) == 4, "all lines")
    site.end(first, second)
    assert site.said[:2] == ["setup on n[1-2]: one", "setup on n[1-2]: two"]
    # A host's control characters do not reach the terminal.
    assert sorted(site.said[2:]) == ["setup on n1: \\x1b[2Jthree", "setup on n2: three"]
    assert first.errand.is_stopped


def test_a_line_does_not_wait_for_hosts_that_never_print_it() -> None:
    site = Site()
    first, second = site.begin("a", lines("alone")), site.begin("b", "")
    wait_until(lambda: site.said, "the line")
    assert site.said == ["setup on a: alone"]
    site.end(first, second)


def test_a_quiet_job_shows_no_output_and_still_its_error() -> None:
    site = Site(console=ConsoleOptions(quiet=True))
    site.end(site.begin("a", lines("one", "the reason"), {**DONE, "code": 3}))
    assert site.said == []
    assert str(site.failed["a"]) == "host a: the setup ended with exit code 3: one | the reason"
    assert site.failed["a"].host == "a"
    assert site.failed["a"].exit_code == 69


def test_what_it_waits_for_is_shown() -> None:
    site = Site()
    link = site.begin("a", "wait\nprogress\n")
    wait_until(lambda: len(link.stages) == 3, "both")
    assert link.stages == ["setup", "setup by another job", "setup"]
    site.end(link)


@pytest.mark.parametrize(
    ("stream", "result", "words"),
    [
        ("line not JSON\n", DONE, "its answer makes no sense"),
        ("x" * (1 << 17), DONE, "a line without an end"),
        ("\xff\n", DONE, "its answer makes no sense"),
        ("", ErrandFailed("setup", "raised", "PermissionError: /x", host="a"), "PermissionError: /x"),
    ],
)
def test_a_host_that_lies_fails_alone(stream: str, result: Any, words: str) -> None:
    site = Site()
    site.end(site.begin("a", stream, result))
    assert words in str(site.failed["a"])


def test_the_key_counts_the_project_and_not_the_copy() -> None:
    tree = "/c/hvlaunch/trees/p-01/2/tree"
    site = Site(sync=SyncOptions("/here", "sub/deep", 1))
    link = site.begin("a", "", about=facts(1)._replace(directory=f"{tree}/sub/deep"))
    site.end(link)
    got = {name: link.arguments[name] for name in ("directory", "root", "project")}
    assert got == {"directory": f"{tree}/sub/deep", "root": tree, "project": "/c/hvlaunch/trees/p-01"}
    site = Site()
    link = site.begin("a", "")
    site.end(link)
    assert {link.arguments[name] for name in ("directory", "root", "project")} == {"/w"}


def test_the_environments_packages_count_for_workers() -> None:
    site = Site()
    result = {**DONE, "environment": "/env", "packages": {"hvlaunch": None, "editable": ["/src"]}}
    site.end(site.begin("a", "", result, facts(1)._replace(packages=WorkerPackages("9", ()))))
    assert site.ready["a"].environment == "/env"
    assert site.ready["a"].packages == WorkerPackages(None, ("/src",))


def test_lines_keep_their_order_however_fast_they_come() -> None:
    site = Site()
    link = site.begin("a", lines(*map(str, range(500))))
    began = time.monotonic()
    wait_until(lambda: len(site.said) == 500, "all lines")
    assert site.said == [f"setup on a: {number}" for number in range(500)]
    assert time.monotonic() - began < 30
    site.end(link)
