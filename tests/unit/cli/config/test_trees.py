"""TOML and YAML as trees of text."""

import pytest
import yaml

from hvlaunch.cli.config import BadSyntax, toml_tree, yaml_tree

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


def test_scalars_of_toml_are_text():
    assert toml_tree(TOML) == {
        "command": "[hosts]\nnp = 3\n",
        "a b": {"c": 'x = ["'},
        "list": ["]", "2"],
        "date": "2026-11-22",
        "one": {
            "two": {"np": "2.5"},
            "three": {"off": "false", "inline": {"np": "1", "deep": {"a": "2"}}},
        },
        "many": [{"np": "1"}],
    }


def test_toml_may_have_windows_line_ends():
    assert toml_tree(TOML.replace("\n", "\r\n")) == toml_tree(TOML)


@pytest.mark.parametrize(
    ("text", "place"),
    [("np = 2\nhosts a\n", "(at line 2, column 7)"), ("np = [\n1,\n", "(at end of document)")],
)
def test_an_error_of_toml_has_its_place(text, place):
    with pytest.raises(BadSyntax) as caught:
        toml_tree(text)
    assert place in str(caught.value)


def test_scalars_of_yaml_stay_text():
    tree = yaml_tree("a: off\nb:\n  c: 0x10\n  'd': [no, 1_0]\ne:\nf: ~\ng: 'null'\n", "f")
    assert tree == {
        "a": "off",
        "b": {"c": "0x10", "d": ["no", "1_0"]},
        "e": None,
        "f": None,
        "g": "null",
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(text):
    assert yaml_tree(text, "f") in ({}, None)
    assert toml_tree("" if text == "---\n" else text) == {}


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


def test_a_table_of_yaml_overrides_the_tables_that_it_merges():
    tree = yaml_tree(MERGES, "f")
    assert tree == yaml.safe_load(MERGES)
    assert isinstance(tree, dict)
    assert tree["b"] == {"v": "v", "x": "s", "y": "r", "z": "t"}
