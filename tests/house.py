"""The figures of the house: language, grain, folders, words. `make house` prints them beside what is wanted.

Limits of the counts that must not rise are in `house_limits.json`; `make lower-limits` writes lower ones there.
"""

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

__all__ = [
    "LIMITS",
    "MOST_ATTRIBUTES",
    "MOST_LINES",
    "MOST_METHODS",
    "Folder",
    "big_classes",
    "counts",
    "folder",
    "modules",
    "nodes_of",
    "parsed",
    "places",
    "unexplained_pauses",
]

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "hvlaunch"
LIMITS = ROOT / "tests" / "house_limits.json"
MOST_LINES = 800
MOST_METHODS = 25
MOST_ATTRIBUTES = 20

_HEADLESS = re.compile(r"(who|whoever|what|whatever|those|that|by|of)\b", re.IGNORECASE)
_POINTER = re.compile(
    r"\b(who|what|that|which|it|them|those|nobody|nothing|none|one|all|so|there)\b", re.IGNORECASE
)
_NO_COMMENT = re.compile(r"#\s*(noqa|type:|pragma|!|-\*-)")
_BAD_NAMES = frozenset(
    (
        "found",
        "one",
        "each",
        "told",
        "said",
        "known",
        "own",
        "there",
        "where",
        "who",
        "what",
        "wanted",
        "rest",
    )
)
_VAGUE_METHODS = {"of", "see", "tell", "look", "end", "take", "place"}
_RIDDLE = re.compile(
    r"_(who|whom|whose|whoever|those|nobody|none)_|_that_is_none|_is_no_|_gets_on|_goes_on|_of_which|_as_ever"
)
_PAUSE = 0.5
"""Seconds. A test that waits this long for no condition costs time, and fails on a slow machine."""
_FOR_EVER = 60.0
"""A program that sleeps this long is no pause: it waits to be stopped."""
_SLEEP = re.compile(r"(?:\b|\\n)sleep[\s('\",]{1,4}(\d+(?:\.\d*)?|\.\d+)([smhd]?)\b")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Language:
    """Counts of sentences and words of some texts."""

    def __init__(self) -> None:
        self.sentences = self.headless = self.words = self.pointers = 0

    def add(self, text: str) -> None:
        """Count the sentences of `text`. Code in backquotes counts as one word."""
        for paragraph in re.split(r"\n\s*\n", re.sub(r"`[^`]*`", "X", text)):
            for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if len(sentence.split()) < 3:
                    continue
                self.sentences += 1
                self.headless += bool(_HEADLESS.match(sentence)) and not sentence.endswith("?")
                self.words += len(re.findall(r"[A-Za-z']+", sentence))
                self.pointers += len(_POINTER.findall(sentence))

    @property
    def headless_percent(self) -> float:
        """Share of sentences that begin with a pointer word."""
        return 100 * self.headless / max(1, self.sentences)

    @property
    def pointers_per_100(self) -> float:
        """Pointer words per 100 words."""
        return 100 * self.pointers / max(1, self.words)


def modules() -> list[Path]:
    """Return the product's Python files, in order."""
    return sorted(PRODUCT.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree: to walk it takes longer than what is counted on the way."""
    return list(ast.walk(parsed(path)))


def docstrings(path: Path) -> Iterator[str]:
    """Yield all docstrings, those of attributes too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from [node.value.value] if isinstance(node.value.value, str) else []


def full_line_comments(path: Path) -> list[str]:
    """Return the comments that have a line to themselves, without directives to tools."""
    with tokenize.open(path) as file:
        return [
            token.string.lstrip("# ")
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.COMMENT
            and token.line.strip().startswith("#")
            and not _NO_COMMENT.match(token.string)
        ]


def _bad_names(path: Path) -> Iterator[str]:
    """Yield the variables and arguments whose names say nothing of what they hold, with file and line."""
    for node in nodes_of(path):
        name = node.arg if isinstance(node, ast.arg) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in _BAD_NAMES:
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}"


@cache
def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]


def vague_methods() -> dict[str, list[str]]:
    """Return the public methods with a name like `end` that more than two classes have, with the classes."""
    owners = defaultdict(list)
    for path in modules():
        for node in _classes(path):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in _VAGUE_METHODS:
                    owners[item.name].append(node.name)
    return {name: classes for name, classes in owners.items() if len(classes) > 2}


def classes_twice() -> list[str]:
    """Return the public class names that are defined more than once."""
    names = Counter(node.name for path in modules() for node in _classes(path))
    return sorted(name for name, number in names.items() if number > 1 and not name.startswith("_"))


def big_classes() -> dict[str, tuple[int, int]]:
    """Return the methods and attributes of each class over the caps, as {"Printer": (41, 28)}.

    An attribute is a name that a method assigns to on `self`. Named tuples and dataclasses are data: their fields
    do not count.
    """
    big = {}
    for path in modules():
        for node in _classes(path):
            functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            attributes = {
                item.attr
                for function in functions
                for item in ast.walk(function)
                if isinstance(item, ast.Attribute)
                and isinstance(item.ctx, ast.Store)
                and isinstance(item.value, ast.Name)
                and item.value.id == "self"
            }
            if len(functions) > MOST_METHODS or len(attributes) > MOST_ATTRIBUTES:
                big[node.name] = len(functions), len(attributes)
    return big


class Folder:
    """The rooms of one folder (files and subfolders), the imports between them, and the longest chain of imports."""

    def __init__(self, path: Path) -> None:
        names = {p.stem for p in path.glob("*.py")} | {p.parent.name for p in path.glob("*/__init__.py")}
        self.rooms = sorted(names - {"__init__"})
        package = ".".join(path.relative_to(ROOT).parts)
        self.arrows: set[tuple[str, str]] = set()
        for file in path.rglob("*.py"):
            source = file.relative_to(path).parts[0].removesuffix(".py")
            for target in _imported(file, package):
                if target in self.rooms and source in self.rooms and target != source:
                    self.arrows.add((source, target))
        self.floors = max((self._height(room, ()) for room in self.rooms), default=0)

    def _height(self, room: str, below: tuple[str, ...]) -> int:
        targets = [target for source, target in self.arrows if source == room and target not in below]
        return 1 + max((self._height(target, (*below, room)) for target in targets), default=0)

    def __str__(self) -> str:
        return f"{len(self.rooms)}/{len(self.arrows)}/{self.floors}"


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the direct children of `package` that a file imports, inside functions too but not for types alone."""
    types_only = {
        id(item)
        for node in nodes_of(file)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for item in ast.walk(node)
    }
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in types_only:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name.startswith(f"{package}."):
                    yield name.removeprefix(f"{package}.").split(".")[0]


def folder(name: str) -> Folder:
    """Return the figures of `hvlaunch/NAME`."""
    return Folder(PRODUCT / name)


def glossary() -> list[str]:
    """Return the words that the developers' glossary explains."""
    text = (ROOT / "docs" / "internals" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|*-][^|]*) \|", text, re.MULTILINE)
    return [word.strip() for row in rows if row != "word" for word in row.split(",")]


def help_texts() -> Iterator[str]:
    """Yield the help of every option."""
    from hvlaunch.cli.options.table import GROUPS

    for group in GROUPS:
        for option in group.options:
            yield option.help


def test_names() -> list[str]:
    """Return the names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return [
        name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)
    ]


def _number(node: ast.expr, numbers: dict[str, float]) -> float | None:
    """Return the value of an expression of numbers and of a file's names for numbers."""
    if isinstance(node, ast.Constant):
        return float(node.value) if isinstance(node.value, int | float) else None
    if isinstance(node, ast.Name):
        return numbers.get(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, numbers), _number(node.right, numbers)
        if left is not None and right is not None:
            # For a sum or a difference, its larger part is near enough.
            return left * right if isinstance(node.op, ast.Mult) else max(left, right)
    return None


def _text(node: ast.expr, numbers: dict[str, float]) -> str:
    """Return a string or number as a command would have it, with numbers put in where an f-string has them."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, numbers) for value in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    number = _number(node.value if isinstance(node, ast.FormattedValue) else node, numbers)
    return "..." if number is None else f"{number:f}"


def _pauses(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what sleeps: calls of `sleep`, and commands and scripts in strings and in lists of words."""
    numbers: dict[str, float] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            number = _number(node.value, numbers)
            if number is not None:
                numbers[node.targets[0].id] = max(number, numbers.get(node.targets[0].id, 0.0))
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = [ast.Constant(name), *node.args]
        elif isinstance(node, ast.List | ast.Tuple):
            words = node.elts
        sleeps = [
            (word, f"sleep {_text(word, numbers)}")
            for before, word in pairwise(words)
            if _text(before, numbers) == "sleep"
        ]
        if isinstance(node, ast.JoinedStr | ast.Constant):
            sleeps.append((node, _text(node, numbers)))
        for place, text in sleeps:
            times = (float(seconds) * _UNITS[unit] for seconds, unit in _SLEEP.findall(text))
            if any(_PAUSE <= seconds < _FOR_EVER for seconds in times):
                yield place


def unexplained_pauses(path: Path) -> list[int]:
    """Return the lines of a test's file that sleep for half a second or more, without a comment why.

    The comment is on that line or on the line before. A directive to a tool is no reason, and nor are two words.
    """
    text = path.read_text()
    if "sleep" not in text:
        return []
    with tokenize.open(path) as file:
        explained = {
            token.start[0]
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.COMMENT
            and not _NO_COMMENT.match(token.string)
            and len(token.string.split()) > 3
        }
    pauses = _pauses(ast.parse(text))
    spans = {(node.lineno, node.end_lineno or node.lineno) for node in pauses}
    return sorted(first for first, last in spans if not explained & set(range(first - 1, last + 1)))


def places() -> dict[str, list[str]]:
    """Return what is counted one by one, by the names of the counts."""
    names = test_names()
    return {
        "variables with bad names": [name for path in modules() for name in _bad_names(path)],
        "tests: names over 80 characters": [name for name in names if len(name) > 80],
        "tests: names that are riddles": [name for name in names if _RIDDLE.search(name)],
        "methods with vague names": [
            f"{owner}.{name}" for name, owners in sorted(vague_methods().items()) for owner in owners
        ],
        "classes defined twice": classes_twice(),
        "files below 50 lines": [
            str(path.relative_to(ROOT)) for path in modules() if path.read_text().count("\n") < 50
        ],
    }


def counts() -> dict[str, int]:
    """Return the figures that may fall and must not rise, by their names. Rates are per 1,000, since texts grow."""
    product, comments, docs, help_of_options = Language(), Language(), Language(), Language()
    for path in modules():
        for text in docstrings(path):
            product.add(text)
        for text in full_line_comments(path):
            comments.add(text)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        docs.add(_prose(page))
    for text in help_texts():
        help_of_options.add(text)
    result = {}
    for name, language in (
        ("docstrings", product),
        ("comments", comments),
        ("docs", docs),
        ("help", help_of_options),
    ):
        result[f"{name}: headless sentences per 1,000"] = round(10 * language.headless_percent)
        result[f"{name}: pointer words per 1,000"] = round(10 * language.pointers_per_100)
    result.update((name, len(listed)) for name, listed in places().items())
    return result


def _prose(page: Path) -> str:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"^[|#<].*$", "", text, flags=re.MULTILINE)


_BEFORE_AND_WANTED = {
    "files": ("492", "~310"),
    "mean lines of a file": ("127", ">= 180"),
    "files below 50 lines": ("102", "<= 25"),
    "of these, no package's __init__": ("82", ""),
    "longest file": ("500", "<= 800"),
    "headless sentences, %": ("12.5", "<= 1"),
    "pointer words per 100": ("11.9", "<= 5"),
    "comments per 1,000 lines": ("2.5", ">= 25"),
    "bad names": ("738", "0"),
    "classes defined twice": ("31", "<= 8"),
    "words of the glossary": ("191", "<= 110"),
    "driver: rooms/arrows/floors": ("56/114/11", "19/32/5"),
    "cli: rooms/arrows/floors": ("52/133/11", "21/47/7"),
    "agent: rooms/arrows/floors": ("38/117/10", "20/64/7"),
    "engine: rooms/arrows/floors": ("29/126/16", "<= 20, <= 11 floors"),
}


def _figures(numbers: dict[str, int]) -> dict[str, str]:
    """Return the figures of the table; `numbers` are the counts()."""
    sizes = [path.read_text().count("\n") for path in modules()]
    language = Language()
    for path in modules():
        for text in docstrings(path):
            language.add(text)
    comments = sum(len(full_line_comments(path)) for path in modules())
    return {
        "files": str(len(sizes)),
        "lines": str(sum(sizes)),
        "mean lines of a file": f"{sum(sizes) / len(sizes):.0f}",
        "files below 50 lines": str(numbers["files below 50 lines"]),
        "of these, no package's __init__": str(
            sum(path.read_text().count("\n") < 50 for path in modules() if path.name != "__init__.py")
        ),
        "longest file": str(max(sizes)),
        "headless sentences, %": f"{language.headless_percent:.1f}",
        "pointer words per 100": f"{language.pointers_per_100:.1f}",
        "comments per 1,000 lines": f"{1000 * comments / sum(sizes):.1f}",
        "bad names": str(numbers["variables with bad names"]),
        "classes defined twice": str(numbers["classes defined twice"]),
        "words of the glossary": str(len(glossary())),
        **{
            f"{name}: rooms/arrows/floors": str(folder(name)) for name in ("driver", "cli", "agent", "engine")
        },
    }


def main() -> None:
    """Print the table, and write lower limits if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lower", action="store_true", help="write counts that have fallen to house_limits.json"
    )
    arguments = parser.parse_args()
    numbers = counts()
    sys.stdout.write(f"{'':30} {'before':>12} {'now':>12}  wanted\n")
    for name, now in _figures(numbers).items():
        before, wanted_text = _BEFORE_AND_WANTED.get(name, ("", ""))
        sys.stdout.write(f"{name:30} {before:>12} {now:>12}  {wanted_text}\n")
    limits = json.loads(LIMITS.read_text())
    sys.stdout.write(f"\n{'must not rise':45} {'now':>6} {'limit':>6}\n")
    for name, number in numbers.items():
        sys.stdout.write(f"{name:45} {number:>6} {limits.get(name, 0):>6}\n")
    if arguments.lower:
        lower = {name: min(number, limits.get(name, number)) for name, number in numbers.items()}
        LIMITS.write_text(json.dumps(lower, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
