"""The results of many jobs, as a table in Markdown."""

import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.faulty.trial import Result

__all__ = ["table"]


def table(results: Sequence[Result]) -> str:
    """A row for each kind of fault: how many jobs, their codes, the seconds to their ends, and how many were right."""
    rows = [
        "| fault | jobs | of these forms | codes | seconds to the end | right |",
        "|---|---|---|---|---|---|",
    ]
    kinds = {result.kind.name: result.kind for result in results}
    for name in kinds:
        of_kind = [result for result in results if result.kind.name == name]
        played = [result for result in of_kind if not result.missed] or of_kind
        codes = Counter("none" if result.code is None else str(result.code) for result in played)
        forms = Counter(result.form.name for result in played)
        seconds = [result.seconds for result in played]
        right = sum(not result.problems for result in of_kind)
        rows.append(
            f"| {name} | {len(of_kind)} | {_counted(forms)} | {_counted(codes)}"
            f" | {statistics.median(seconds):.1f} (at most {max(seconds):.1f}) | {right} of {len(of_kind)} |"
        )
    missed = sum(result.missed for result in results)
    right = sum(not result.problems for result in results)
    return "\n".join(
        [*rows, "", f"{right} of {len(results)} were right; in {missed} the fault came too late to hurt."]
    )


def _counted(counter: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counter.items())
