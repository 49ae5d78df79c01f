"""What the command lines of benchmarks have in common."""

import argparse
import sys

from tests.testhosts.hosts import missing

__all__ = ["argument_parser", "need_hosts"]


def argument_parser(text: str | None) -> argparse.ArgumentParser:
    """`text` is shown as it is: a module's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def need_hosts() -> None:
    """Ends the program with 1 where this machine can't make hosts of namespaces."""
    if why := missing():
        sys.exit(f"no hosts: {why}")
