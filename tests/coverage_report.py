"""Shows what the last run of pytest --cov has covered: `python -m tests.coverage_report`."""

from pathlib import PurePath

from coverage import Coverage

__all__: list[str] = []

ENOUGH = 80  # percent; modules below are named


def main() -> None:
    """Print the share of lines that ran, of the whole package and of the modules that have the least."""
    coverage = Coverage()
    coverage.load()
    shares: list[tuple[float, str]] = []
    lines = run = 0
    for path in coverage.get_data().measured_files():
        _, executable, _, missing, _ = coverage.analysis2(path)
        if executable:
            lines += len(executable)
            run += len(executable) - len(missing)
            shares.append((100 * (1 - len(missing) / len(executable)), _module(path)))
    print(f"coverage by unit tests, in pytest's own processes: {100 * run / lines:.1f}% of {lines} lines")  # noqa: T201
    for share, module in sorted(shares):
        if share < ENOUGH:
            print(f"  {share:5.1f}%  {module}")  # noqa: T201


def _module(path: str) -> str:
    """`hvlaunch/job.py` of where it is installed."""
    parts = PurePath(path).parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("hvlaunch") :])


if __name__ == "__main__":
    main()
