"""nvidia-smi, where its library can't be had. It takes a tenth of a second of a processor, so it is asked seldom."""

from __future__ import annotations

import shutil
import subprocess
import time

from hvlaunch.agent.observer.gpu import THROTTLES, NoGpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__all__ = ["Program"]

_EVERY = 5.0
_WITHIN = 20.0
_FIELDS = (
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
)
_MEBI = 1 << 20


class Program:
    """Raises NoGpus where there is no such program."""

    def __init__(self) -> None:
        self._path = shutil.which("nvidia-smi")
        if self._path is None:
            raise NoGpus("there is no nvidia-smi")
        self._last: Optional[float] = None
        self._found: List[Dict[str, Any]] = []

    def read(self) -> List[Dict[str, Any]]:
        """All GPUs, as they were a few seconds ago. Raises OSError, subprocess.SubprocessError."""
        now = time.monotonic()
        if self._last is None or now - self._last >= _EVERY:
            self._last = now
            pids: Dict[str, List[int]] = {}
            for words in self._ask("--query-compute-apps=gpu_uuid,pid"):
                pids.setdefault(words[0], []).append(int(words[1]))
            self._found = [_gpu(words, pids) for words in self._ask("--query-gpu=" + ",".join(_FIELDS))]
        return self._found

    def _ask(self, query: str) -> List[List[str]]:
        done = subprocess.run(
            [self._path or "", query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WITHIN,
            check=True,
        )
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        return [[word.strip() for word in line.split(",")] for line in lines if line.strip()]


def _gpu(words: List[str], pids: Dict[str, List[int]]) -> Dict[str, Any]:
    index, uuid, name, *numbers, reasons = words
    utilization, used, total, power, temperature, ecc = (_number(word) for word in numbers)
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    return {
        "index": int(index),
        "name": name,
        "utilization": utilization / 100,
        "memory_used": int(used * _MEBI),
        "memory_total": int(total * _MEBI),
        "power": power,
        "temperature": temperature,
        "throttled": [word for bit, word in THROTTLES.items() if bits & bit],
        "ecc_errors": int(ecc),
        "xids": [],
        "pids": pids.get(uuid, []),
    }


def _number(word: str) -> float:
    """0 where the GPU has no such number: `[N/A]`."""
    try:
        return float(word)
    except ValueError:
        return 0.0
