"""Questions that people asked about other launchers are answered by the site's search: by one of the first three pages that it shows."""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.browser import Browser, needs_chromium
from tests.testhosts.hosts import wait_until
from tests.unit.docs.conftest import search

LIMIT = 100.0
FIRST = 3
pytestmark = [pytest.mark.timeout(600), pytest.mark.no_cover, needs_chromium]


class Question(NamedTuple):
    """A thread of an issue tracker, what its author might type here, and the pages with the answer."""

    title: str
    thread: str
    typed: str
    answers: tuple[str, ...]


QUESTIONS = [
    Question(*fields[:3], tuple(fields[3].split()))
    for fields in (
        (
            "torchrun: RendezvousConnectionError when use C10d on multi nodes",
            "pytorch/pytorch#107021",
            "torchrun multiple nodes rendezvous connection",
            "from/torchrun",
        ),
        (
            "torch.distributed.run to discover an available port automatically",
            "pytorch/pytorch#73320",
            "address already in use",
            "guides/four-hosts",
        ),
        (
            "torch.distributed.launch outputs all processes to stdout",
            "pytorch/pytorch#7134",
            "only rank 0 output",
            "guides/four-hosts reference/output",
        ),
        (
            "Partial Ranks Hang for a long time after other ranks finished",
            "meta-pytorch/torchrec#189",
            "partial ranks hang after other ranks finished",
            "guides/hangs",
        ),
        (
            "ChildFailedError (exitcode: -9)",
            "hpcaitech/ColossalAI#3172",
            "exitcode -9 out of memory",
            "guides/troubleshooting",
        ),
        (
            "Error: Received 1 death signal, shutting down workers",
            "open-mmlab/mmrotate#210",
            "nohup SIGHUP terminal closed",
            "guides/log-out",
        ),
        (
            "tcp connection refused when multinode training",
            "meta-pytorch/data#1142",
            "connection refused",
            "guides/troubleshooting",
        ),
        (
            "How to set NCCL_SOCKET_IFNAME",
            "NVIDIA/nccl#286",
            "NCCL_SOCKET_IFNAME",
            "guides/four-hosts reference/environment",
        ),
        ("NCCL failure common.cu:916 (it times out)", "NVIDIA/nccl-tests#15", "nccl timeout", "guides/hangs"),
        (
            "Horovodrun give me Permission denied (publickey,password)",
            "horovod/horovod#2117",
            "permission denied publickey",
            "guides/troubleshooting guides/ssh",
        ),
        (
            "SSH authentication (which port)",
            "horovod/horovod#211",
            "horovodrun ssh port",
            "guides/ssh",
        ),
        (
            "Horovod: Running on multiple machines",
            "horovod/horovod#415",
            "running on multiple machines",
            "guides/four-hosts start",
        ),
        (
            "Support resurrecting blacklisted hosts",
            "horovod/horovod#3319",
            "blacklisted host",
            "guides/lost-host",
        ),
        (
            "Add deepspeed env file to pass custom env values",
            "deepspeedai/DeepSpeed#117",
            "pass environment variables",
            "guides/four-hosts",
        ),
        (
            "Confusion in deepspeed launching (where is the hostfile)",
            "deepspeedai/DeepSpeedExamples#145",
            "deepspeed hostfile",
            "from/deepspeed",
        ),
        (
            "Feature request - SLURM support",
            "huggingface/accelerate#1239",
            "accelerate slurm",
            "guides/schedulers from/accelerate",
        ),
        (
            "prrte: ctrl+c doesn't terminate the child processes",
            "openpmix/prrte#943",
            "ctrl-c leaves processes",
            "guides/failures",
        ),
        (
            "MPI environment variables are not set",
            "deepspeedai/DeepSpeed#6895",
            "mpi4py mpirun",
            "from/mpirun reference/mpi",
        ),
        (
            "[Train] Cannot reproduce fault-tolerance, script hangs upon any node shutdown",
            "ray-project/ray#22349",
            "node shutdown fault tolerance",
            "guides/lost-host",
        ),
        (
            "[tune] Can't find my logs (in a Jupyter notebook)",
            "ray-project/ray#4527",
            "jupyter notebook",
            "guides/python",
        ),
    )
]
SHOWN = """\
const links = [...document.querySelectorAll(".md-search-result__item > a.md-search-result__link")];
return links.map(link => link.href);
"""


def pages_shown(browser: Browser, address: str, typed: str) -> list[str]:
    """Return the pages of a search, in their order."""
    search(browser, "")
    wait_until(lambda: not browser.web.execute_script(SHOWN) or None, "an empty list", LIMIT)
    search(browser, typed)
    links = wait_until(lambda: browser.web.execute_script(SHOWN) or None, f"results for {typed}", LIMIT)
    base = urlsplit(address).path
    return list(dict.fromkeys(urlsplit(link).path.removeprefix(base).strip("/") for link in links))


def test_there_are_twenty_questions_from_different_threads() -> None:
    assert len({question.thread for question in QUESTIONS}) == len(QUESTIONS) == 20
    assert len({question.thread.partition("/")[0] for question in QUESTIONS}) >= 8


def test_the_search_leads_to_the_answer(address: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.web.get(address)
        shown = {question: pages_shown(browser, address, question.typed) for question in QUESTIONS}
    finally:
        browser.web.quit()
    wrong = {
        question.typed: pages[: 2 * FIRST]
        for question, pages in shown.items()
        if not set(question.answers) & set(pages[:FIRST])
    }
    assert wrong == {}
