"""Makes torch and scikit-learn's digits load in half the time, in each Python that has this directory in PYTHONPATH.

A first optimizer loads torch's compilers, for a second of a processor, only to say that they need not look at it. A tenth of
that is enough to read the digits from their file. The unit tests of the examples load everything.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class NoCompilers(ModuleType):
    """Stands for torch._dynamo and all that is in it: nothing is compiled, and every function stays as it is."""

    def __getattr__(self, name: str) -> "NoCompilers":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def disable(self, function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function


def load_digits() -> SimpleNamespace:
    """Return what scikit-learn's function of this name does, as far as the examples use it."""
    import numpy as np

    rows = np.loadtxt(DATA, delimiter=",")
    data = rows[:, :-1]
    return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=rows[:, -1].astype(int))


sys.modules["torch._dynamo"] = NoCompilers("torch._dynamo")
LEARN = find_spec("sklearn")
if LEARN is not None and LEARN.origin is not None:
    DATA = Path(LEARN.origin).parent / "datasets/data/digits.csv.gz"
    for name in ("sklearn", "sklearn.datasets"):
        sys.modules[name] = ModuleType(name)
    sys.modules["sklearn.datasets"].load_digits = load_digits  # type: ignore[attr-defined]
