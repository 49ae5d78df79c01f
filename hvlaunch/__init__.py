"""hvlaunch: starts distributed PyTorch training on machines that you can ssh into.

From Python, run() and Launcher call functions on these machines (docs/guides/python.md).
"""

__version__ = "0.2.0"

# Names are imported on first use, because workers and drivers import this package too. __init__.pyi has the types.
_PLACES = {
    "Cluster": "launcher",
    "Job": "job",
    "Launcher": "launcher",
    "Line": "job",
    "attach": "job",
    "jobs": "job",
    "run": "launcher",
    **dict.fromkeys(
        ("CallNotPickled", "JobFailed", "JobStopped", "ResultLost", "ResultNotRead", "WorkerFailed"), "errors"
    ),
}

__all__ = ["__version__", *_PLACES]  # noqa: PLE0604 (they are names)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 (a job's start has no need of it)

    value = globals()[name] = getattr(import_module(f"hvlaunch.api.{_PLACES[name]}"), name)
    return value


def __dir__() -> "list[str]":  # quoted: tests run it on each host's Python
    return sorted({*globals(), *__all__})
