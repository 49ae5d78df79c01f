"""A bar below the cell of a notebook, while hosts are connected."""

import html
import sys
from collections.abc import Callable
from typing import Any

from hvlaunch.console.status import Status

__all__ = ["notebook_bar"]


def notebook_bar() -> Callable[[Status | None], None] | None:
    """What shows a status in place of the last one, and with None removes it; None where this is no notebook.

    By the rich display of Jupyter, whose outputs may be updated: https://jupyter-client.readthedocs.io/en/stable/messaging.html
    """
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if getattr(shell, "kernel", None) is None:  # IPython in a terminal has none
        return None
    shown: list[Any] = []

    def show(status: Status | None) -> None:
        data = _displayed(status)
        if shown:
            shown[0].update(data, raw=True)
        elif status is not None:
            from IPython import display  # noqa: PLC0415 (it is there where there is a kernel)

            show_new: Any = display.display
            shown.append(show_new(data, raw=True, display_id=True))

    return show


def _displayed(status: Status | None) -> dict[str, str]:
    """By media type."""
    if status is None:
        return {"text/plain": "", "text/html": ""}
    known = f' value="{status.done}" max="{status.of}"' if status.of else ""
    lines = "<br>".join(html.escape(line) for line in status.text.split("\n"))
    return {"text/plain": status.text, "text/html": f"<progress{known}></progress> {lines}"}
