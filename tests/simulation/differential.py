"""Compare the engine with an earlier one: both get the same events of simulated jobs, and must want the same done.

    python -m tests.simulation.differential --before main --seeds 10000
    python -m tests.simulation.differential --before HEAD~3 --seeds 100 --first 4711 --kind "elastic, with takeovers"

The engine of the revision becomes a package of its own in a temporary folder. Modules outside of the engine (job, errors,
hosts.placement) are those of the working tree for both. The exit code is 1 if a seed differs; the seed and its turn are printed.
"""

import argparse
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.engine import actions as do
from hvlaunch.engine import engine as engine_module
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.workers import InvalidTransition
from hvlaunch.job import JobSpec
from tests.simulation import elastic_world, world
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.wired_elastic import WiredElasticWorld
from tests.simulation.wired_static import WiredStaticWorld
from tests.simulation.world import World

__all__ = ["KINDS", "Different", "Outcome", "compare", "engine_before"]

_ROOT = Path(__file__).parents[2]
_FAULTS = (0.02, 0.3, 0.0)

KINDS: Mapping[str, Callable[[int], Play]] = {
    "static": lambda seed: World(seed, faults=_FAULTS[seed % len(_FAULTS)]),
    "static, workers fail": lambda seed: World(seed, faults=0.0, failures=0.5),
    "elastic": ElasticWorld,
    "static, with takeovers": lambda seed: WiredStaticWorld(seed, faults=_FAULTS[seed % len(_FAULTS)] / 3),
    "elastic, with takeovers": WiredElasticWorld,
}


class Different(Exception):
    """The two engines do not want the same. `turn` counts the events of this engine from 0."""

    def __init__(self, turn: int, now: float, event: on.Event, before: object, after: object) -> None:
        super().__init__(f"turn {turn}, at {now:.3f}, {event}:\n  before: {before}\n  now:    {after}")
        self.turn = turn


class Outcome(NamedTuple):
    """`different` is the first difference, `words` of it begin with the kind of job and the seed."""

    turns: int
    broken: int
    """Histories that a law of the simulator ended; they were equal as far as they went."""
    different: Different | None = None
    words: str = ""


@contextmanager
def engine_before(revision: str | None) -> Iterator[ModuleType]:
    """Load the engine package of a git revision, or once more that of the working tree, under another name."""
    name = "engine_before_" + ("".join(filter(str.isalnum, revision)) if revision else "here")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / name
        package.mkdir()
        for source, text in _sources(revision):
            (package / source).write_text(text.replace("hvlaunch.engine", name))
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            for file in sorted(package.glob("[!_]*.py")):
                importlib.import_module(f"{name}.{file.stem}")
            try:
                yield sys.modules[name]
            finally:
                for module in [module for module in sys.modules if module.partition(".")[0] == name]:
                    del sys.modules[module]


def _sources(revision: str | None) -> Iterator[tuple[str, str]]:
    folder = "hvlaunch/engine"
    if revision is None:
        for path in sorted((_ROOT / folder).glob("*.py")):
            yield path.name, path.read_text()
        return
    command = ["git", "-C", str(_ROOT), "archive", revision, folder]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            file = members.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                yield Path(member.name).name, file.read().decode()


class _Earlier:
    """The earlier engine beside one of ours. It gets events of its own classes, by their names."""

    def __init__(self, package: ModuleType, spec: JobSpec, port: int) -> None:
        self._events = sys.modules[f"{package.__name__}.events"]
        self._engine: Any = sys.modules[f"{package.__name__}.engine"].Engine(spec, port)
        self._turn = -1

    def handle(self, event: on.Event, now: float, engine: Engine, actions: list[do.Action]) -> None:
        """Give it the event that `engine` has had. Raises Different."""
        self._turn += 1
        before = self._engine.handle(self._of(event), now)
        mine, ours = _state(before, self._engine), _state(actions, engine)
        if mine != ours:
            raise Different(self._turn, now, event, mine, ours)

    def _of(self, event: on.Event) -> Any:
        kind = getattr(self._events, type(event).__name__)
        if kind._fields == event._fields:
            return kind(*event)
        return kind(**{name: getattr(event, name) for name in kind._fields})


def _state(actions: list[Any], engine: Any) -> tuple[object, ...]:
    # repr() has the names of classes and all fields, as the codec has, and takes a tenth of its time.
    return repr(actions), engine.deadline, engine.is_idle, engine.phase.name


@contextmanager
def _beside(package: ModuleType) -> Iterator[list[int]]:
    """Let each engine that a world makes have an earlier one beside it; yields the number of turns compared."""
    # Not an attribute of the engine: the worlds compare engines by all that is in them.
    earlier: WeakKeyDictionary[Engine, _Earlier] = WeakKeyDictionary()
    turns = [0]

    class Paired(Engine):
        def __init__(self, spec: JobSpec, rendezvous_port: int) -> None:
            super().__init__(spec, rendezvous_port)
            earlier[self] = _Earlier(package, spec, rendezvous_port)

        def handle(self, event: on.Event, now: float) -> list[do.Action]:
            actions = super().handle(event, now)
            turns[0] += 1
            earlier[self].handle(event, now, self, actions)
            return actions

    with (
        mock.patch.object(world, "Engine", Paired),
        mock.patch.object(elastic_world, "Engine", Paired),
        mock.patch.object(engine_module, "Engine", Paired),
    ):
        yield turns


def compare(package: ModuleType, kind: str, seeds: Iterable[int]) -> Outcome:
    """Play these jobs with both engines, up to the first difference."""
    broken = 0
    with _beside(package) as turns:
        for seed in seeds:
            try:
                KINDS[kind](seed).run()
            except Different as different:
                return Outcome(turns[0], broken, different, f"{kind}, seed {seed}, {different}")
            except (AssertionError, InvalidTransition, BadFrame):
                broken += 1
    return Outcome(turns[0], broken)


def main() -> int:
    """Compare as the command line says; 1 if an engine differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="REV", help="git revision; default: the working tree itself")
    parser.add_argument("--seeds", type=int, default=1000, help="of each kind of job")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kind", choices=KINDS, action="append")
    options = parser.parse_args()
    is_equal = True
    with engine_before(options.before) as package:
        for kind in options.kind or KINDS:
            began = time.monotonic()
            outcome = compare(package, kind, range(options.first, options.first + options.seeds))
            is_equal = is_equal and outcome.different is None
            words = outcome.words or f"{kind}: {options.seeds} seeds, {outcome.turns} turns, equal"
            broken = f", {outcome.broken} ended by a law" if outcome.broken else ""
            sys.stdout.write(f"{words}{broken} ({time.monotonic() - began:.0f} s)\n")
            sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
