"""The fenced blocks of the documents, and the command lines that a shell would make of them."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "ROOT", "Block", "Typed", "blocks_of", "name_of", "shell_text", "typed"]

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "hvlaunch/SKILL.md",
    ],
    key=lambda path: (len(path.parts), path),
)
_FENCE = re.compile(r"( *)```(.*)")
_RECORDER = r"""
command_not_found_handle() {
    printf '%s\0' "$number" "$#" "$@" >> "$record"
    [ "$1" != hvlaunch ] || echo 4a5fac6ebd8e
}
.() { :; }
cd() { :; }
cat() { while IFS= read -r line; do echo "$line"; done; }
mkdir() { case ${!#} in "$HOME"/*) /bin/mkdir "$@" ;; esac; }
enable -n kill
number=0
for block; do
    if eval "typed() { :
$block
}"; then (typed; wait); else printf '%s\0' "$number" 0 >> "$record"; fi
    number=$((number + 1))
done
"""
"""No program is found, so nothing is run: each command is put down instead, and one of no words for a block with bad syntax."""


class Block(NamedTuple):
    """What stands between two fences of a page."""

    page: str
    line: int
    """That of the first fence, from 1."""
    language: str
    """As its first fence says; "" where it says none."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class Typed(NamedTuple):
    """A command as its program gets it, and the block that it is from."""

    block: Block
    words: tuple[str, ...]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(path: Path) -> list[Block]:
    """In their order. A block that does not end is an error."""
    return list(_blocks(path))


def _blocks(path: Path) -> Iterator[Block]:
    lines = enumerate(path.read_text().splitlines(), 1)
    for number, line in lines:
        if fence := _FENCE.fullmatch(line):
            indent, language = fence.groups()
            inside: list[str] = []
            for _, content in lines:
                if content.strip() == "```":
                    break
                inside.append(content.removeprefix(indent))
            else:
                raise AssertionError(f"{name_of(path)}:{number}: the block has no end")
            yield Block(name_of(path), number, language, "\n".join(inside) + "\n")


def shell_text(block: Block) -> str:
    """What one types of it: all of a script, the lines behind `$` of a session."""
    if block.language == "sh":
        return block.text
    return "".join(line[2:] + "\n" for line in block.text.splitlines() if line.startswith("$ "))


def typed(blocks: Sequence[Block], directory: Path) -> Iterator[Typed]:
    """The commands of these blocks, as bash gives them to programs, in an empty home. Files are as they are in `directory`.

    A block that bash can't read has one command, of no words.
    """
    record = directory / "record"
    env = {"PATH": "/nonexistent", "HOME": str(directory), "LC_ALL": "C", "record": str(record)}
    subprocess.run(
        ["/bin/bash", "-c", _RECORDER, "bash", *map(shell_text, blocks)],
        cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    fields = iter(record.read_text().split("\0")[:-1] if record.exists() else ())
    for number in fields:
        yield Typed(blocks[int(number)], tuple(next(fields) for _ in range(int(next(fields)))))
