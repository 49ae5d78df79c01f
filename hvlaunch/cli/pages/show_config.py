"""--show-config: a file of options with the source of each as a comment."""

import json
import re
from collections.abc import Iterator, Sequence

from hvlaunch.cli.config import group_key, key_of
from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import default_text
from hvlaunch.cli.options.settings import Options, Setting
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.console.masking import MASK, masked, masked_value, masked_words

__all__ = ["show_config"]

_BARE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_COLUMN = 48
# Surrogates stand for bytes that are not UTF-8.
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def show_config(options: Options, groups: Sequence[OptionGroup]) -> str:
    """Return the text. It is a file of options itself, except for masked secrets."""
    blocks = [list(_command(options))]
    for group in groups:
        lines = [line for option in _once(group) for line in _lines(option, options)]
        blocks.append([f"[{group_key(group)}]", *lines] if lines else [])
    text = "\n".join("\n".join([*lines, ""]) for lines in blocks if lines)
    # `****` in a value would be taken for the value.
    if f'{MASK}"' in text and not options.show_secrets:
        text += f"\n# {MASK} hides what may be a secret; --show-secrets shows it\n"
    return text or "# no option is set\n"


def _once(group: OptionGroup) -> Iterator[Option]:
    """Yield the group's options, without those that no file can set."""
    yield from (option for option in group.options if option.source in ("any", "own"))


def _command(options: Options) -> Iterator[str]:
    settings = options.settings.get(COMMAND.name, ())
    for setting in settings[-1:]:
        words = setting.texts if options.show_secrets else masked_words(setting.texts)
        yield _line("command", _list(words), settings[-1:])


def _lines(option: Option, options: Options) -> Iterator[str]:
    settings = [setting for setting in options.settings.get(option.name, ()) if setting.option == option]
    if settings:
        # Only the last setting of such an option counts.
        if not option.repeats:
            settings = settings[-1:]
        yield _line(key_of(option), _value(option, settings, show_secrets=options.show_secrets), settings)
    elif options.verbose and not options.settings.get(option.name):
        default = default_text(option).replace("`", "") or ("false" if option.value is None else "not set")
        yield f"# {key_of(option)}: {default}"


def _value(option: Option, settings: Sequence[Setting], *, show_secrets: bool) -> str:
    if option.value is None:
        return "false" if settings[-1].value is False else "true"
    texts = [text for setting in settings for text in setting.texts]
    if not show_secrets:
        # Shown to others in bug reports and logs.
        texts = [_masked(option, text) for text in texts]
    if option.repeats == "join":
        return _scalar(",".join(texts))
    return _list(texts) if option.repeats or len(option.value.metavars) > 1 else _scalar(texts[0])


def _masked(option: Option, text: str) -> str:
    name, equals, value = text.partition("=")
    is_variable = option.value is not None and option.value.is_assignment
    return f"{name}={masked(name, value)}" if is_variable and equals else masked_value(text)


def _line(key: str, value: str, settings: Sequence[Setting]) -> str:
    """Return a line of TOML; a comment if the value is not UTF-8, which a TOML file can't contain."""
    origins = ", ".join(dict.fromkeys(_origin(setting) for setting in settings))
    line, bytes_count = _NOT_UTF8.subn(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", f"{key} = {value}")
    if bytes_count:
        line, origins = f"# {line}", f"{origins}; not UTF-8, so no file can set it"
    return f"{line.ljust(_COLUMN)}  # {origins}"


def _origin(setting: Setting) -> str:
    if setting.origin == "environment":
        return setting.called
    table = f" [{setting.table}]" if setting.table else ""
    return f"{setting.origin}{table}" if setting.origin else "command line"


def _list(texts: Sequence[str] | Iterator[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _scalar(text: str) -> str:
    return text if _BARE.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """Return a basic string of TOML. Its escapes are JSON's, except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
