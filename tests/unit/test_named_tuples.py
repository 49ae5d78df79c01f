"""hvlaunch's named tuples are as typing's, whose behaviour each test here takes from typing's own."""

import copy
import inspect
import pickle
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch import named_tuples
from tests.unit.agent.harness import interpreter


class Ours(named_tuples.NamedTuple):
    """A place."""

    host: str
    slot: int = 0
    """Counted from 0."""
    names: "tuple[str, ...]" = ()

    @property
    def text(self) -> str:
        return f"{self.host}:{self.slot}"

    def moved(self, host: str) -> "Ours":
        return self._replace(host=host)


class Theirs(typing.NamedTuple):
    """A place."""

    host: str
    slot: int = 0
    names: "tuple[str, ...]" = ()


class Empty(named_tuples.NamedTuple):
    """Has no fields."""


class Below(Ours):
    """A subclass, which may have attributes."""


@pytest.mark.parametrize(
    ("values", "named"), [(("a",), {}), (("a", 1), {"names": ("x",)}), ((), {"slot": 2, "host": "b"})]
)
def test_instances_are_like_typings(values: tuple[object, ...], named: dict[str, object]) -> None:
    ours, theirs = Ours(*values, **named), Theirs(*values, **named)  # type: ignore[arg-type]
    assert tuple(ours) == tuple(theirs) == ours
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours._asdict() == theirs._asdict()
    assert (ours.host, ours.slot, ours.names) == tuple(theirs)


@pytest.mark.parametrize(
    ("values", "named"),
    [((), {}), (("a", 1, (), 4), {}), (("a",), {"host": "b"}), (("a",), {"rank": 1}), ((), {"slot": 1})],
)
def test_wrong_arguments_are_a_type_error_at_the_first_instance_too(
    values: tuple[object, ...], named: dict[str, object]
) -> None:
    class Fresh(named_tuples.NamedTuple):
        host: str
        slot: int = 0
        names: "tuple[str, ...]" = ()

    texts = []
    for kind in (Theirs, Fresh, Fresh):
        with pytest.raises(TypeError) as error:
            kind(*values, **named)  # type: ignore[arg-type]
        texts.append(str(error.value).partition("()")[2])
    assert texts[0] == texts[1] == texts[2]


def test_copies() -> None:
    ours = Ours("a", 1)
    assert type(ours._replace(slot=2)) is Ours
    assert ours._replace(slot=2) == ("a", 2, ())
    assert ours.moved("b").text == "b:1"
    with pytest.raises(ValueError, match="rank"):
        ours._replace(rank=1)  # type: ignore[call-arg]
    assert Ours._make(["a", 1, ()]) == ours
    with pytest.raises(TypeError):
        Ours._make(["a", 1, (), 4])
    for other in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert (type(other), other) == (Ours, ours)


def test_fields_can_not_be_set() -> None:
    ours = Ours("a")
    for name in ("host", "other"):
        with pytest.raises(AttributeError):
            setattr(ours, name, "b")


def test_a_class_describes_itself() -> None:
    assert Ours._fields == Theirs._fields == ("host", "slot", "names")
    assert Ours._field_defaults == Theirs._field_defaults == {"slot": 0, "names": ()}
    assert typing.get_type_hints(Ours) == typing.get_type_hints(Theirs)
    assert Ours.__doc__ == "A place."
    names = ["host", "slot", "names"]
    for kind in (Ours, Below, Theirs):
        parameters = inspect.signature(kind).parameters
        assert list(parameters) == names
        assert [parameter.default for parameter in parameters.values()][1:] == [0, ()]
    assert str(inspect.signature(Empty)) == "()"
    match Ours("a", 3):
        case Ours(host, slot=3):
            assert host == "a"
        case _:
            pytest.fail("no match")


def test_a_class_without_fields_and_a_subclass() -> None:
    assert (Empty(), repr(Empty())) == ((), "Empty()")
    with pytest.raises(TypeError):
        Empty(1)  # type: ignore[call-arg]
    below = Below("a")
    below.more = 1  # type: ignore[attr-defined]
    assert (type(below), type(below._replace(slot=1)), below) == (Below, Below, ("a", 0, ()))
    assert (type(Ours("a")), type(pickle.loads(pickle.dumps(below)))) == (Ours, Below)


PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("named_tuples", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
class A(module.NamedTuple):
    a: int
    b: "list[int]" = ()
    def double(self) -> int:
        return 2 * self.a
assert (A._fields, A._field_defaults, A(1), A(a=2, b=3).double()) == (("a", "b"), {"b": ()}, (1, ()), 4)
assert (A(1)._replace(b=4), repr(A(1)), list(A.__annotations__)) == ((1, 4), "A(a=1, b=())", ["a", "b"])
"""


def test_a_first_instance_at_the_end_leaves_the_exit_code_as_it_is() -> None:
    program = """
import atexit
from hvlaunch.named_tuples import NamedTuple
class A(NamedTuple):
    a: int
atexit.register(A, 1)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("version", ["3.14", "3.15"])
def test_annotations_that_are_a_function(version: str) -> None:
    file = Path(named_tuples.__file__)
    subprocess.run([interpreter(version), "-I", "-c", PROGRAM, str(file)], check=True, timeout=60)


def test_all_of_the_product_are_these() -> None:
    """Code for hosts alone, which runs without hvlaunch, has typing's."""
    package = Path(hvlaunch.__file__).parent
    of_typing = re.compile(r"^ *from typing import (\([^)]*|.*)\bNamedTuple\b", re.MULTILINE)
    files = {
        path.relative_to(package) for path in package.rglob("*.py") if of_typing.search(path.read_text())
    }
    assert {path.parts[0] for path in files} == {"agent", "named_tuples.py"}
