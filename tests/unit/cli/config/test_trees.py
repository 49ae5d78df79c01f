"""TOML and YAML, and the lines of what is in them."""

import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.cli.config.toml_tree import toml_tree
from hvlaunch.cli.config.tree import Node
from hvlaunch.cli.config.yaml_tree import yaml_tree

if sys.version_info >= (3, 11):
    import tomllib as toml_module
else:
    import tomli as toml_module

TOML = '''\
# a comment: x = 1

command = """
[hosts]
np = 3
"""
"a b".c = 'x = ["'   # ]

list = [  # np = 1
  "]", # }
  2,
]
date = 2026-11-22
[one.two]
np = 2.50

  [one . "three" ]   # a comment
off = false
inline = { np = 1, deep = { a = 2 } }
[[many]]
np = 1
'''


def lines(node, path=()):
    found = {path: node.line}
    if isinstance(node.value, dict):
        for key, each in node.value.items():
            found |= lines(each, (*path, key))
    return found


def test_the_lines_of_toml():
    root = toml_tree(TOML)
    found = lines(root)
    assert {path: line for path, line in found.items() if path} == {
        ("command",): 3,
        ("a b",): 7,
        ("a b", "c"): 7,
        ("list",): 9,
        ("date",): 13,
        ("one",): 14,
        ("one", "two"): 14,
        ("one", "two", "np"): 15,
        ("one", "three"): 17,
        ("one", "three", "off"): 18,
        ("one", "three", "inline"): 19,
        ("one", "three", "inline", "np"): 19,
        ("one", "three", "inline", "deep"): 19,
        ("one", "three", "inline", "deep", "a"): 19,
        ("many",): 20,
    }
    document = plain(root)
    assert document["one"]["two"] == {"np": "2.5"}
    assert document["one"]["three"]["off"] == "false"
    assert document["list"] == ["]", "2"]
    assert document["command"] == "[hosts]\nnp = 3\n"


def plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: plain(each) for key, each in node.value.items()}
    return [plain(each) for each in node.value] if isinstance(node.value, list) else node.value


VALUES = st.sampled_from(
    [
        "1",
        "'x'",
        '"""\na = 1\n[b]\n"""',
        "'''\n'''",
        "[\n'[',\n[1, 2],\n]",
        "{ a = [1,\n2] }",
        '"]"',
        "true # }",
    ]
)


@given(st.lists(st.tuples(st.booleans(), VALUES), max_size=12))
def test_each_statement_of_toml_is_found_where_it_begins(statements):
    text = ""
    expected: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, (is_table, value) in enumerate(statements):
        path = (f"t{number}",) if is_table else (*table, f"k{number}")
        expected[path] = text.count("\n") + 1
        text += f"[t{number}]\n\n" if is_table else f"k{number} = {value}\n# x = [\n"
        table = path if is_table else table
    found = lines(toml_tree(text))
    assert {path: found[path] for path in expected} == expected


def test_windows_line_ends_of_toml_are_as_good():
    assert toml_tree(TOML.replace("\n", "\r\n")) == toml_tree(TOML)


@pytest.mark.parametrize(
    "text",
    [
        "hosts = [\n" + "".join(f'  "gpu[{n}]:4",\n' for n in range(1000)) + "]\n",
        'text = """\n' + "]\n" * 1000 + '"""\n',
    ],
    ids=["a list of hosts", "a text"],
)
def test_no_line_of_toml_is_read_again_and_again(text, monkeypatch):
    whole = toml_module.loads
    lengths: list[int] = []

    def loads(part: str) -> Any:
        lengths.append(len(part))
        return whole(part)

    monkeypatch.setattr(toml_module, "loads", loads)
    toml_tree(text)
    assert len(text) <= sum(lengths) < 3 * len(text)


def test_yaml_keeps_texts_and_lines():
    root = yaml_tree("a: off\nb:\n  c: 0x10\n  'd': [no, 1_0]\ne:\nf: ~\ng: 'null'\n", "f")
    assert lines(root) == {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "d"): 4,
        ("e",): 5,
        ("f",): 6,
        ("g",): 7,
    }
    assert plain(root) == {
        "a": "off",
        "b": {"c": "0x10", "d": ["no", "1_0"]},
        "e": None,
        "f": None,
        "g": "null",
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(text):
    assert yaml_tree(text, "f").value in ({}, None)
    assert toml_tree("" if text == "---\n" else text).value == {}


MERGES = """\
a: &a
  x: q
  y: r
c: &c {y: w, v: v}
b:
  z: t
  <<: [*a, *c]
  x: s
d:
  <<: *a
'<<': {}
"""


def test_a_table_of_yaml_merges_others_of_which_the_first_counts_most():
    root = yaml_tree(MERGES, "f")
    assert plain(root) == yaml.safe_load(MERGES)
    assert plain(root)["b"] == {"v": "v", "x": "s", "y": "r", "z": "t"}
    found = lines(root)
    assert (found["b", "x"], found["b", "y"], found["b", "v"], found["d",]) == (8, 3, 4, 9)
