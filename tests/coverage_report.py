"""Shows what the last run of pytest --cov has covered: `python -m tests.coverage_report`."""

from pathlib import Path

from coverage import Coverage

__all__: list[str] = []

ENOUGH = 80  # percent; modules below are named


def main() -> None:
    """Print the share of lines that ran, of the whole package and of the modules that have the least."""
    coverage = Coverage()
    coverage.load()
    shares: list[tuple[float, str]] = []
    lines = run = 0
    files = coverage.get_data().measured_files()
    package = next(
        path.removesuffix("/__init__.py") for path in files if path.endswith("/hvlaunch/__init__.py")
    )
    for path in files:
        # A test runs tests/errands/example.py under the name of a module of ours, so that file is measured too.
        if not path.startswith(f"{package}/"):
            continue
        _, executable, _, missing, _ = coverage.analysis2(path)
        if executable:
            lines += len(executable)
            run += len(executable) - len(missing)
            shares.append((100 * (1 - len(missing) / len(executable)), _module(path, package)))
    print(f"coverage by unit tests, in pytest's own processes: {100 * run / lines:.1f}% of {lines} lines")  # noqa: T201
    for share, module in sorted(shares):
        if share < ENOUGH:
            print(f"  {share:5.1f}%  {module}")  # noqa: T201


def _module(path: str, package: str) -> str:
    """`hvlaunch/job.py` of where it is installed."""
    return str(Path("hvlaunch", Path(path).relative_to(package)))


if __name__ == "__main__":
    main()
