"""Parses a command line by a program's own parser, from its sources alone: python own_parser.py SOURCES vllm|sglang WORDS...

Prints the parsed options as JSON. SOURCES has the program's wheel, unpacked, and the packages that its parser really needs.
Imports of all other packages, and of the program's parts for GPUs, give stand-ins that take everything.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union

PROGRAMS = "vllm", "sglang"
PARTS = tuple(
    f"vllm.{part}"
    for part in (
        *("distributed", "v1", "model_executor", "entrypoints.launchers", "renderers", "multimodal", "lora"),
        *("usage", "platforms", "config.quantization"),
    )
)
"""Parts of vLLM that its options do not need, and that want a GPU or a model."""


class StandIn:
    """A class, function, type or value of a package that is not installed."""

    device_type = "cpu"

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Decorators return the function."""
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self

    def __get_pydantic_core_schema__(self, *_: object) -> object:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __or__(self, other: Any) -> Any:
        return Union[str, other]  # noqa: UP007 (the other may be a stand-in)

    __ror__ = __or__

    def __getitem__(self, _: object) -> "StandIn":
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __mro_entries__(self, bases: Sequence[object]) -> tuple[type, ...]:
        return (object,) if len(bases) == 1 else ()

    def __instancecheck__(self, _: object) -> bool:
        return False

    def __gt__(self, _: object) -> bool:
        return False

    __ge__ = __lt__ = __le__ = __gt__


class StandInModule(types.ModuleType):
    __path__ = []  # noqa: RUF012 (its type is that of modules)
    __version__ = "0"

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for PARTS, and for packages that only the programs import."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        is_stand_in = name.startswith(PARTS) or isinstance(sys.modules.get(top), StandInModule)
        if not is_stand_in and top not in PROGRAMS and not importlib.machinery.PathFinder.find_spec(top):
            frame = sys._getframe(1)
            while frame.f_back and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            # Others, as torch, do without the packages that they try.
            is_stand_in = str(frame.f_globals.get("__name__")).partition(".")[0] in PROGRAMS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stand_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def vllm(words: Sequence[str]) -> argparse.Namespace:
    """Parse and check as `vllm serve` does."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # type: ignore[import-not-found, unused-ignore]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found, unused-ignore]

    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    options: argparse.Namespace = parser.parse_args(words)
    serve.validate(options)
    return options


def sglang(words: Sequence[str]) -> argparse.Namespace:
    """Parse as `python -m sglang.launch_server` does."""
    # Without its __init__, which changes transformers.
    package = types.ModuleType("sglang")
    package.__path__ = [f"{sys.argv[1]}/sglang"]
    sys.modules["sglang"] = package
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.insert(0, Finder())
    options = {"vllm": vllm, "sglang": sglang}[sys.argv[2]](sys.argv[3:])
    sys.stdout.write("\n" + json.dumps(vars(options), default=str) + "\n")


if __name__ == "__main__":
    main()
