"""The file of `--report`: JSON or a page, by its name. It is there as a whole or not at all."""

import json
import os
from pathlib import Path

from hvlaunch.errors import BadUsage
from hvlaunch.owners import part_of, reason, write_whole
from hvlaunch.report.failure_report import FailureReport

__all__ = ["check_report_path", "write_report"]


def check_report_path(path: Path) -> None:
    """That the report can be written there, as far as it can be known before. Raises BadUsage."""
    hint = "a file in a directory that you may write to"
    if path.exists() and not path.is_file():
        raise BadUsage(f"--report {path}: it is no file", hint=hint)
    try:
        part, descriptor = part_of(path)
        os.close(descriptor)
        part.unlink()
    except OSError as error:
        raise BadUsage(f"--report {path}: {reason(error)}", hint=hint) from None


def write_report(path: Path, report: FailureReport) -> None:
    """Raises OSError."""
    from hvlaunch.report.json_form import as_json  # noqa: PLC0415 (when the job has ended)

    form = as_json(report)
    if path.suffix == ".html":
        from hvlaunch.report.html_page import as_html  # noqa: PLC0415 (as above)

        text = as_html(form)
    else:
        text = json.dumps(form, indent=2) + "\n"
    write_whole(path, text.encode(), 0o600)
