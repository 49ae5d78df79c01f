"""The file of `--report`: JSON or HTML, by its suffix. It is written whole or not at all."""

import json
import os
from pathlib import Path

from hvlaunch.errors import BadUsage
from hvlaunch.owners import part_of, reason, write_whole
from hvlaunch.report.failure_report import FailureReport

__all__ = ["check_report_path", "write_report"]


def check_report_path(path: Path) -> None:
    """Check early that the report can be written to `path`. Raises BadUsage."""
    hint = "a file in a directory that you may write to"
    if path.exists() and not path.is_file():
        raise BadUsage(f"--report {path}: it is no file", hint=hint)
    # Only a trial shows whether the directory takes a file; the job may run for days before the report is due.
    try:
        part, descriptor = part_of(path)
        os.close(descriptor)
        part.unlink()
    except OSError as error:
        raise BadUsage(f"--report {path}: {reason(error)}", hint=hint) from None


def write_report(path: Path, report: FailureReport) -> None:
    """Write the report to `path`. Raises OSError."""
    from hvlaunch.report.json_form import as_json  # noqa: PLC0415 (when the job has ended)

    # The HTML form is made from the JSON form, so secrets are masked once for both.
    form = as_json(report)
    if path.suffix == ".html":
        from hvlaunch.report.html_page import as_html  # noqa: PLC0415 (as above)

        text = as_html(form)
    else:
        text = json.dumps(form, indent=2) + "\n"
    write_whole(path, text.encode(), 0o600)
