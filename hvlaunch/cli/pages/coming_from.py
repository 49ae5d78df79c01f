"""Make docs/coming-from.md from the options of other launchers: `make options-page`."""

import re
import sys
from collections.abc import Iterator, Mapping

from hvlaunch.cli.foreign import LAUNCHERS, Becomes, ForeignOption, OtherLauncher, key

__all__ = ["page"]

_HEAD = """\
<!-- Made of hvlaunch/cli/foreign.json by `make options-page`: change that, not this. -->
# Coming from another launcher

For each launcher: a job there and the same job here, the options that both have, and what becomes of all others. hvlaunch
answers the same where an option is typed that it does not have. [Its own](options.md) come before the command, and a Python
script is started with `python`."""

_WORDS = re.compile(r"(?:(?<![A-Za-z])'[^']*'|\"[^\"]*\"|\$\(\([^)]*\)\)|\S)+")
_STARTS = re.compile(r"-{1,2}[A-Za-z].*|python|timeout|numactl|taskset|kill|nodeset|sh")
_FOLLOWS = re.compile(
    r"[A-Z_][A-Z_0-9]*(=.*)?|[A-Z]:[A-Z]|hvlaunch|all|none|openssh|paramiko|\.\.\.|[0-9]+|[a-z][:,].*|'.*'|\".*\""
)
"""Words that begin text to type, and words that may continue it."""

_TITLES: Mapping[Becomes, tuple[str, str]] = {
    "another word": ("Another word", "here"),
    "not needed": ("Not needed", "because"),
    "not here": ("Not there", "because"),
    "another meaning": ("The same name with another meaning", "here"),
}


def page(launchers: Mapping[str, OtherLauncher] = LAUNCHERS) -> str:
    """Return the page as Markdown."""
    blocks = [block for name, launcher in launchers.items() for block in _blocks(name, launcher)]
    return "\n\n".join([_HEAD, *blocks]) + "\n"


def _blocks(name: str, launcher: OtherLauncher) -> Iterator[str]:
    options = launcher.options
    yield f"## {name}"
    yield f"```sh\n{launcher.there}\n{launcher.here}\n```"
    if launcher.notes:
        yield launcher.notes
    same = [f"`{option.spelled}`" for option in options if option.becomes == "same"]
    yield f"The same here: {', '.join(same)}."
    for becomes, (title, column) in _TITLES.items():
        rows = [
            f"| `{option.spelled}` | {_here(option)} |" for option in options if option.becomes == becomes
        ]
        if rows:
            yield "\n".join([f"{title}:", "", f"| option | {column} |", "|---|---|", *rows])


def _here(option: ForeignOption) -> str:
    values = " ".join(option.metavars)
    names = {key(name) for name in option.names}
    typed = f"{option.names[-1]} {values}".rstrip() if len(names) == 1 else "OPTION"
    text = (
        option.here.replace("{option}", typed).replace("{=}", values.replace(" ", "=")).replace("{}", values)
    )
    return _with_code(text).replace("|", "\\|")


def _with_code(text: str) -> str:
    """Put text to type in backquotes: an option or a program, and its arguments."""
    parts: list[str] = []
    for word in _WORDS.findall(text):
        before = "(" if word.startswith("(") else ""
        bare = word[len(before) :].rstrip(",;:)" if before or "(" not in word else ",;:")
        after = word[len(before) + len(bare) :]
        is_in_code = bool(parts) and parts[-1].endswith("`")
        if is_in_code and (_STARTS.fullmatch(bare) or _FOLLOWS.fullmatch(bare)) and not before:
            parts[-1] = f"{parts[-1][:-1]} {bare}`{after}"
        elif _STARTS.fullmatch(bare):
            parts.append(f"{before}`{bare}`{after}")
        else:
            parts.append(word)
    return " ".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
