"""From what a file or a variable has to the words that the command line would have. All raise BadValue."""

from collections.abc import Iterator, Sequence

from hvlaunch.cli.config.tree import Node
from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import BadValue, Option
from hvlaunch.cli.options.table import COMMAND

__all__ = ["texts_of", "texts_of_variable"]


def texts_of(option: Option, node: Node) -> Iterator[Sequence[str]]:
    """The words of each of its settings, of a value in a file; of a switch `true` or the like."""
    value = node.value
    if isinstance(value, dict):
        if not option.value or not option.value.is_assignment:
            raise BadValue("takes no table")
        yield from ([f"{_name(name)}={_scalar(each)}"] for name, each in value.items())
    elif option is COMMAND:
        yield _command(
            [_scalar(each) for each in value] if isinstance(value, list) else values.words(_scalar(node))
        )
    elif not isinstance(value, list):
        yield _split(option, _scalar(node))
    elif option.repeats == "join":
        yield [",".join(map(_scalar, value))]
    elif option.repeats:
        yield from ([_scalar(each)] for each in value)
    elif _count(option) > 1:
        yield _counted([_scalar(each) for each in value], _count(option))
    else:
        raise BadValue("takes no list")


def texts_of_variable(option: Option, text: str) -> Iterator[Sequence[str]]:
    """The words of each of its settings, of the text of a variable: several are parted as a shell does it."""
    if option is COMMAND:
        yield _command(values.words(text))
    elif option.repeats in ("list", "add") and option.value and not option.value.has_options:
        yield from ([word] for word in values.words(text))
    else:
        yield _split(option, text)


def _split(option: Option, text: str) -> Sequence[str]:
    count = _count(option)
    return [text] if count == 1 else _counted(values.words(text), count)


def _count(option: Option) -> int:
    return 1 if option.value is None else len(option.value.metavars) or 1


def _counted(texts: Sequence[str], count: int) -> Sequence[str]:
    if len(texts) != count:
        raise BadValue(f"takes {count} values, and not {len(texts)}")
    return texts


def _command(words: Sequence[str]) -> Sequence[str]:
    if not words:
        raise BadValue("must not be empty")
    return words


def _name(name: str) -> str:
    if not name or "=" in name:
        raise BadValue(f"{name!r} is no name")
    return name


def _scalar(node: Node) -> str:
    if not isinstance(node.value, str):
        raise BadValue("has no value" if node.value is None else "is nested too deep")
    return node.value
