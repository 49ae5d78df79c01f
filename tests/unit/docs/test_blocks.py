"""Every block of the documents is in a language that is known here, and right in it: commands, programs, files."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.config import toml_tree, yaml_tree
from hvlaunch.cli.env_file import parse_env_file
from hvlaunch.cli.hosts.bisect import bisect_options
from hvlaunch.cli.hosts.check import check_options
from hvlaunch.cli.hosts.hosts import GPU_OPTIONS, hosts_parser
from hvlaunch.cli.jobs import parser_of
from hvlaunch.cli.jobs.pool_commands import run_pool_command
from hvlaunch.cli.jobs.queue_commands import QUEUE_OPTIONS, queue_parser
from hvlaunch.cli.options.parser import JOB_WORDS
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.plan import plan
from hvlaunch.cli.rendezvous import parser as rendezvous_parser
from hvlaunch.cli.spec import first_round, job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hostfile
from tests.unit.docs.blocks import PAGES, ROOT, Block, blocks_of, name_of, typed
from tests.unit.docs.names import unknown_names

READERS_FILES = {
    "hosts": "a slots=4\nb slots=4\n",
    "hosts.txt": "a slots=4\nb slots=4\n",
    "questions.txt": "",
    "secrets.env": "TOKEN=1\n",
    "discover.sh": "#!/bin/sh\necho a:8\n",
    "job.yaml": "num-proc: 2\n",
    ".config/hvlaunch/config.toml": "[profiles.gpu8]\nquiet = true\n",
    ".ssh/cluster": "",
    ".ssh/cluster_key": "",
}
"""Files that a page takes for granted."""
RUN_IT = ("nohup", "salloc")
OWN_FOLDERS = ("benchmarks/", "examples/", "hostfiles/", "tests/")
PROGRAMS = (
    "python",
    "bash",
    "hostname",
    "./run.sh",
    "true",
    "stop",
    "serve",
    "llama-server",
    "vllm",
    "llama-server",
    "python3",
    "torchrun",
    "accelerate",
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
"""But those that differ by the version of Python."""


def python(block: Block) -> None:
    assert unknown_names(block.text) == []


def text(block: Block) -> None:
    assert not re.search(r"^\$ ", block.text, re.MULTILINE), "a session is `console`"


def ssh_config(block: Block) -> None:
    ssh = shutil.which("ssh")
    assert ssh, "the documents' ssh configurations are read by ssh"
    done = subprocess.run(
        [ssh, "-G", "-F", "/dev/stdin", "gpu01"],
        input=block.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def ini(block: Block) -> None:
    configparser.ConfigParser(interpolation=None).read_string(block.text)


READERS: Mapping[str, Callable[[Block], object]] = {
    "dotenv": lambda block: parse_env_file(block.text, source=block.where),
    "hostfile": lambda block: parse_hostfile(block.text, block.where),
    "ini": ini,
    "json": lambda block: json.loads(block.text),
    "python": python,
    "ssh-config": ssh_config,
    "text": text,
    "toml": lambda block: toml_tree(block.text),
    "yaml": lambda block: yaml_tree(block.text, block.where),
}
"""What each language is read by; a shell's are below."""


def job(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """The job that a command line asks for, as `--dry-run` shows it."""
    options = parse(words, environ=environ)
    if options.show_config or options.check_build:
        return
    spec, _ = job_spec(options, environ)
    commands = [role.templates.words for role in spec.roles] or [spec.command]
    assert all(command[0] in PROGRAMS for command in commands), "an option that is none"
    if spec.mpi is None:
        plan(first_round(spec), left_out=(), launcher="", show_secrets=False)


def hvlaunch(words: Sequence[str], environ: Mapping[str, str]) -> None:
    try:
        if list(words[:2]) == ["pool", "up"]:  # which would connect
            job([*words[3:], "true"], environ)
        elif words[0] == "doctor":  # as above
            job([*(word for word in words[1:] if word != "--json"), "true"], environ)
        elif list(words[:2]) == ["hosts", "-H"]:  # which would connect
            parse([*words[1:], "--", "true"], (*GROUPS, GPU_OPTIONS), environ=environ)
        elif words[0] == "check":
            check_options(words[1:], environ)
        elif words[0] == "bisect":
            bisect_options(words[1:], environ)
        elif words[0] == "hosts":
            hosts_parser().parse_args(words[1:])
        elif words[0] == "rerun" and len(words) > 1:  # options of a job follow
            job([*words[2:], "true"], environ)
        elif words[0] == "cp":  # which would connect
            job([*(word for word in words[1:-2] if word != "--json"), "true"], environ)
        elif list(words[:2]) == ["queue", "add"]:  # which would start it
            parse(words[2:], (*GROUPS, QUEUE_OPTIONS), environ=environ)
        elif words[0] == "queue":
            queue_parser(words[1]).parse_args(words[2:])
        elif words[0] == "pool":
            run_pool_command(words[1:], environ)
        elif words[0] in JOB_WORDS:
            parser_of(words[0]).parse_args(words[1:])
        else:
            job(words, environ)
    except Answered:
        return
    except BadUsage as error:
        if not str(error).startswith("there is no pool lab;"):
            raise


def check_words(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """What can be said of a command without its program: hvlaunch's own are read, and other words may name what is ours."""
    if words[0] in ("hvlaunch", *RUN_IT) and "hvlaunch" in words:
        hvlaunch(words[words.index("hvlaunch") + 1 :], environ)
    elif words[0] == "hvlaunch-rendezvous":
        rendezvous_parser().parse_args(words[1:])
    elif words[0] == "make":
        assert set(words[1:]) <= TARGETS
    for number, word in enumerate(words):
        if word.startswith(OWN_FOLDERS):
            assert (ROOT / word).exists(), f"there is no {word}"
            source = (ROOT / word).read_text() if word.endswith(".py") and words[0] != "pytest" else ""
            flags = [flag for flag in words[number + 1 :] if flag.startswith("--")] if source else []
            assert [flag for flag in flags if f'"{flag}"' not in source] == [], f"not of {word}"
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", " ".join(words)):
        assert PINS.get(name, version) == version, "constraints.txt has another version"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory of a user's, who has what the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    for name, content in READERS_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o700)
    return tmp_path


def check_file(block: Block, home: Path) -> None:
    """A file of options has its name in its first line; it is written where the page's next commands are typed."""
    if block.language in ("toml", "yaml") and (found := re.match(r"# (\S+\.\w+)\n", block.text)):
        name = Path(found[1]).name
        (home / name).write_text(block.text)
        words = ["--config-file", name, *(["--profile", "gpu8"] if "gpu8" in block.text else [])]
        options = parse([*words, "true"], environ={})
        assert len(options.given) > len(words) // 2, "none of it is an option"
        job_spec(options, {})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_of_a_page_is_right(page, home):
    environ = {"HOME": str(home), "USER": "ada", "PATH": "/usr/bin:/bin"}
    blocks = blocks_of(page)
    shell = [block for block in blocks if block.language == "sh"]
    commands = list(typed(shell, home))
    wrong = []
    for block in blocks:
        try:
            if block.language == "console":
                assert block.text.startswith("$ "), (
                    "a session begins with a command"
                )  # test_sessions.py runs it
            elif block.language == "sh":
                own = [command.words for command in commands if command.block is block]
                assert () not in own, "bash can't read it"
                lines = re.findall(r"^hvlaunch(?:-rendezvous)? ", block.text, re.MULTILINE)
                assert sum("hvlaunch" in " ".join(words[:9]) for words in own) >= len(lines), (
                    "a command was not reached"
                )
                for words in own:
                    check_words(words, environ)
            else:
                assert block.language in READERS, f"no known language: {block.language!r}"
                READERS[block.language](block)
                check_file(block, home)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whoever reads it)
            wrong.append(f"{block.where}: {type(error).__name__}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


SHOWN_FOR = {"N": "2", "SHELL": "bash", "NAME": "lab", "COMMAND": "true"}
"""What stands for the reader's own in a line of text."""


def inline_commands(page: Path) -> list[str]:
    """Command lines within sentences, but for those that show what may be left out."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`hvlaunch ([^`\n]+)`", text)
    return [span for span in spans if not re.search(r"[\[…|]| or ", span)]


@pytest.mark.parametrize("page", [page for page in PAGES if inline_commands(page)], ids=name_of)
def test_a_command_within_a_sentence_is_understood(page, home):
    environ = {"HOME": str(home), "USER": "ada", "PATH": "/usr/bin:/bin"}
    wrong = []
    for span in inline_commands(page):
        words = [SHOWN_FOR.get(word, word) for word in shlex.split(span)]
        if words[0] in JOB_WORDS:
            words = shlex.split(span)
        elif not words[0].startswith("-"):
            continue  # a sentence of hvlaunch's own
        try:
            hvlaunch(words, environ)
        except BadUsage as error:
            if not str(error).startswith("no command to run;"):
                wrong.append(f"{span}: {error}")
    assert wrong == []
