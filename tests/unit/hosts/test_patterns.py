"""Patterns for names of variables."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.hosts.local import is_pattern, matcher

CHARACTERS = "AB*?[]!_\n"


@pytest.mark.parametrize(
    ("patterns", "names", "others"),
    [
        (("PATH",), ["PATH"], ["PATHS", "XPATH", "path", ""]),
        (("NCCL_*",), ["NCCL_", "NCCL_DEBUG", "NCCL_A\nB"], ["NCCL", "XNCCL_A"]),
        (("*_DEVICES",), ["_DEVICES", "CUDA_DEVICES"], ["CUDA_DEVICES_"]),
        (("A?", "B[12]", "C*D*"), ["AX", "B2", "CD", "CXDX"], ["A", "B3", "CX"]),
        (("*",), ["", "A"], []),
        (("A*", "A*B*"), ["A", "AXBX"], ["B"]),
        ((), [], ["", "A"]),
    ],
)
def test_names(patterns, names, others):
    matches = matcher(*patterns)
    assert [name for name in [*names, *others] if matches(name)] == names


@given(st.lists(st.text(CHARACTERS, max_size=4), max_size=4), st.text(CHARACTERS, max_size=6))
def test_it_is_as_for_file_names(patterns, name):
    assert matcher(*patterns)(name) == any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_a_plain_name_is_not_a_pattern():
    assert [text for text in ("A", "A*", "A?", "[A]", "") if is_pattern(text)] == ["A*", "A?", "[A]"]
