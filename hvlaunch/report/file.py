"""The file of `--report`: JSON or a page, by its name. It is there as a whole or not at all."""

import json
import os
import secrets
from pathlib import Path

from hvlaunch.errors import BadUsage
from hvlaunch.owners import open_not_planted
from hvlaunch.report.data import FailureReport

__all__ = ["check_report_path", "reason", "write_report"]


def check_report_path(path: Path) -> None:
    """That the report can be written there, as far as it can be known before. Raises BadUsage."""
    hint = "a file in a directory that you may write to"
    if path.exists() and not path.is_file():
        raise BadUsage(f"--report {path}: it is no file", hint=hint)
    part = _part(path)
    try:
        os.close(_open(part))
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
    part = _part(path)
    try:
        with os.fdopen(_open(part), "wb") as file:
            file.write(text.encode())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def reason(error: OSError) -> str:
    """In words."""
    return (error.strerror or os.strerror(error.errno or 0)).lower()


def _part(path: Path) -> Path:
    return path.with_name(f".hvlaunch-{secrets.token_hex(4)}.part")


def _open(path: Path) -> int:
    return open_not_planted(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
