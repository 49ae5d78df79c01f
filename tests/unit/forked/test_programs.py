"""Which command lines are for the fork server of a pool."""

import pytest

from hvlaunch.forked.programs import names_pool
from hvlaunch.forked.request import Request


def is_for_p(words: list[str], **environ: str) -> bool:
    request = Request("command line", "", ["hvlaunch", *words], [], environ, 0, {}, frozenset(), frozenset())
    return names_pool("p", request)


@pytest.mark.parametrize(
    "words",
    [
        ["--pool", "p", "true"],
        ["--pool=p", "true"],
        ["-np", "2", "--pool", "q", "-v", "--pool", "p", "true"],
        ["--pool", "p", "true", "--pool", "q"],
        ["--pool", "p"],
    ],
)
def test_a_job_on_the_pool(words: list[str]) -> None:
    assert is_for_p(words)
    assert is_for_p(words, HVLAUNCH_POOL="q")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["true"],
        ["-v", "true", "--pool", "p"],
        ["--pool", "q", "true", "--pool", "p"],
        ["--pool"],
        ["pool", "status"],
        ["jobs", "--pool", "p"],
        ["--no-such-option", "--pool", "p"],
        ["-x", "--pool", "p"],
    ],
)
def test_what_is_none(words: list[str]) -> None:
    assert not is_for_p(words)


def test_the_pool_is_named_by_the_environment() -> None:
    assert is_for_p(["-v", "true"], HVLAUNCH_POOL="p")
    assert not is_for_p(["--pool", "q", "true"], HVLAUNCH_POOL="p")
    assert not is_for_p(["pool", "status"], HVLAUNCH_POOL="p")
