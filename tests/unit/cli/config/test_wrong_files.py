"""Files as trees of text, and wrong files: each error is one line with the file, the table and the key, and a hint."""

import os
import subprocess
import sys

import pytest
import yaml

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.config import BadSyntax, toml_tree, yaml_tree
from hvlaunch.errors import BadUsage

WRONG = {
    "a key that no option has": ("job.toml", "np = 2\nnum-porc = 4\n", "", "unknown key 'num-porc'", "num-proc"),
    "in YAML": ("job.yaml", "np: 2\nmax_restart: 4\n", "", "unknown key 'max_restart'", "max-restarts"),
    "nothing like it": ("job.yaml", "qqqq: 4\n", "", "unknown key 'qqqq'", "hvlaunch --help"),
    "nothing near": ("job.yaml", "base: 4\n", "", "unknown key 'base'", "hvlaunch --help"),
    "nothing near in a small group": ("job.yaml", "timeline:\n  qqqq: 4\n", ": [timeline]", "unknown key 'qqqq'", "one of filename, "),
    "in a group": ("job.yaml", "ssh:\n  ssh_prot: 22\n", ": [ssh]", "unknown key 'ssh_prot'", "ssh-port"),
    "another group's": ("job.toml", "[hosts]\nnp = 2\n", ": [hosts]", "np is not in the group hosts", "np in workers"),
    "a group that there is not": ("job.toml", "\n[worker]\nnp = 2\n", "", "unknown key 'worker'", "one of workers, "),
    "the end of a key": ("job.toml", "user = 'me'\n", "", "unknown key 'user'", "ssh-user"),
    "in a profile that is not used": ("job.toml", "[profiles.a]\nhost = 'a'\ngraec = 2\n", ": [profiles.a]", "unknown key 'graec'", "grace"),
    "horovodrun's section": ("h.yaml", "params:\n  fusion_threshold: 1\n", ": [params]", "unknown key 'fusion_threshold'", "fusion_threshold_mb"),
    "enabled for what can't be": ("h.yaml", "timeline:\n  enabled: true\n", ": [timeline]", "unknown key 'enabled'", "one of filename, "),
    "controller": ("h.yaml", "controller: glo\n", "", "unknown key 'glo'", "gloo"),
    "a word for a number": ("job.yaml", "np: 2\ngrace: soon\n", "", "grace: 'soon' is not a number of seconds", "grace: SECONDS"),
    "true for a number": ("job.toml", "np = true\n", "", "np: 'true' is not a whole number", "np: N"),
    "a number for a switch": ("job.toml", "merge = 3\n", "", "merge: '3' is neither true nor false", "merge: true or false"),
    "none of the choices": ("job.yaml", "color: red\n", "", "color: invalid choice: 'red'", "color: auto or always or never"),
    "a list for one value": ("job.toml", "np = [\n1,\n2]\n", "", "np: takes no list", "np: N"),
    "a table for one value": ("job.yaml", "grace:\n  max: 3\n", "", "grace: takes no table", "grace: SECONDS"),
    "a list in a list": ("job.toml", "hosts = [['a']]\n", "", "hosts: is nested too deep", "hosts: HOST,..."),
    "one number of two": ("job.toml", "blacklist-cooldown-range = 5\n", "", "takes 2 values, and not 1", ": MIN MAX"),
    "three of two": ("job.toml", "blacklist-cooldown-range = [1, 2, 3]\n", "", "takes 2 values, and not 3", ": MIN MAX"),
    "an empty command": ("job.toml", "command = []\n", "", "command: must not be empty", "command: COMMAND ARG"),
    "a quote in a command": ("job.yaml", "command: echo it's\n", "", "no closing quotation", "command: "),
    "twice by two names": ("job.toml", "np = 2\n[workers]\nnum-proc = 3\n", ": [workers]", "num-proc is set twice, first as np", "hvlaunch --help"),
    "twice in YAML": ("job.yaml", "np: 2\nnp: 3\n", ":2", "np is set twice, first in line 1", "docs/reference/config.md"),
    "twice in TOML": ("job.toml", "np = 2\nnp = 3\n", "", "cannot overwrite a value", "docs/reference/config.md"),
    "two that exclude each other": ("job.toml", "quiet = true\nverbose = true\n", "", "verbose: not allowed with quiet", "hvlaunch --help"),
    "a question": ("job.toml", "np = 2\nversion = true\n", "", "version can't be set in a file", "--version on the command line"),
    "another file": ("job.toml", "config-file = 'x.toml'\n", "", "config-file can't be set in a file", "--config-file on the"),
    "a group that is a word": ("job.toml", "ssh = 3\n", "", "ssh must be a table of keys and values", "hvlaunch --help"),
    "a profile that names another": ("job.toml", "[profiles.a]\nprofile = 'b'\n[profiles.b]\n", ": [profiles.a]", "profile can't be set in a profile", "--profile NAME"),
    "profiles that are a list": ("job.yaml", "np: 2\nprofiles: [a]\n", "", "profiles must be a table", "hvlaunch --help"),
    "a list": ("job.yaml", "- np: 2\n", "", "the file must be a table of keys", "hvlaunch --help"),
    "no TOML": ("job.toml", "np = 2\nhosts a\n", "", "expected '=' after a key in a key/value pair (at line 2, column 7)", "docs/reference/config.md has examples of TOML"),
    "an open TOML string": ("job.toml", "np = 2\nhosts = 'a\n", "", "", "docs/reference/config.md has examples of TOML"),
    "no YAML": ("job.yaml", "np: 2\nhosts: [a\n", ":3", "expected ',' or ']'", "docs/reference/config.md has examples of YAML"),
    "a tab": ("job.yaml", "ssh:\n\tssh_port: 2\n", ":2", "found character '\\t'", "docs/reference/config.md has examples of YAML"),
    "two documents": ("job.yaml", "np: 2\n---\nnp: 3\n", ":2", "but found another document", "docs/reference/config.md has"),
    "too deep": ("job.yaml", "a: {a: {a: {a: {a: {a: {a: {a: 1}}}}}}}\n", ":1", "it is nested too deep", "docs/reference/config.md"),
    "a merge of no table": ("job.yaml", "ssh:\n  <<: 3\n", ":2", "<< takes a table, or a list of tables", "docs/reference/config.md has"),
    "a merge of itself": ("job.yaml", "a: &a {<<: *a}\n", "", "it is nested too deep", "docs/reference/config.md has"),
    "half a character": ("job.yaml", 'x:\n  A: "\\ud800"\n', ":2", "an escape that is no character", "docs/reference/config.md has"),
    "half a character in a key": ("job.yaml", '"\\ud800": 1\n', ":1", "an escape that is no character", "docs/reference/config.md has"),
    "no UTF-8": ("job.toml", b"np = 2\n# \xff\n", ":2", "not UTF-8 text", "save it as UTF-8"),
    "a name with a =": ("job.toml", "[environment.x]\n'A=B' = 1\n", ": [environment]", "x: 'A=B' is no name", "x: NAME[=VALUE]"),
    "no name": ("job.yaml", "x: {'': 1}\n", "", "x: '' is no name", "x: NAME[=VALUE]"),
    "a variable without a value": ("job.yaml", "x:\n  A:\n", "", "x: has no value", "x: NAME[=VALUE]"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(name, text, environ=None):
    with open(name, "wb") as file:  # noqa: PTH123 (here)
        file.write(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadUsage) as caught:
        parse(["--config-file", name, "true"], environ=environ or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_it_names_file_and_key_and_what_to_try(case):
    name, text, place, cause, hint = WRONG[case]
    message = refusal(name, text)
    assert message.startswith(f"{name}{place} " if place.startswith(": [") else f"{name}{place}: ")
    assert cause in message
    assert f"; try: {hint}" in message or (
        hint.startswith(": ") and f"{hint}" in message.partition("; try: ")[2]
    )
    assert "\n" not in message


def for_all():
    os.close(os.open("job.yaml", os.O_CREAT))
    os.chmod("job.yaml", 0o666)  # noqa: PTH101


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: None, "job.yaml: no such file or directory; try: --config-file FILE"),
        (lambda: os.mkdir("job.yaml"), "job.yaml: is a directory; try: "),  # noqa: PTH102
        (for_all, "job.yaml: every user of this machine can change it"),
    ],
)  # fmt: skip
def test_a_file_that_can_not_be_used(make, text):
    make()
    with pytest.raises(BadUsage) as caught:
        parse(["--config-file", "job.yaml", "true"], environ={})
    assert text in str(caught.value)


def test_a_file_that_is_too_long():
    assert "job.yaml: it is longer than 1 MiB" in refusal("job.yaml", "#" * (2 << 20))


def test_a_yaml_bomb_is_refused_at_once():
    lines = ["a0: &a0 [" + ",".join(["x"] * 500) + "]"]
    lines += [f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 500) + "]" for n in range(1, 4)]
    assert "it has more than 100000 values" in refusal("job.yaml", "\n".join(lines))


def test_a_yaml_bomb_of_merges_is_refused_at_once():
    lines = ["a0: &a0 {" + ",".join(f"k{n}: 1" for n in range(100)) + "}"]
    lines += [f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 50)}]}}" for n in range(1, 5)]
    assert "it has more than 100000 values" in refusal("job.yaml", "\n".join(lines))


def test_nesting_without_end_is_refused():
    assert "job.yaml" in refusal("job.yaml", "[" * 100_000)
    assert "job.toml" in refusal("job.toml", "x = " + "[" * 100_000)


def test_yaml_without_pyyaml_says_what_to_install():
    script = (
        "import sys; sys.modules['yaml'] = None\n"
        "from hvlaunch.cli.main import main; sys.exit(main(['--config-file', 'job.yaml', 'true']))"
    )
    with open("job.yaml", "w") as file:  # noqa: PTH123
        file.write("np: 2\n")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        "hvlaunch: job.yaml: PyYAML, which reads YAML, is not installed; try: pip install 'hvlaunch[yaml]', "
        "or the same as TOML, in a file whose name ends with .toml\n"
    )


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HVLAUNCH_NP": "two"}, "environment: HVLAUNCH_NP: 'two' is not a whole number; try: hvlaunch --help"),
        ({"HVLAUNCH_MERGE": "maybe"}, "environment: HVLAUNCH_MERGE: 'maybe' is neither true nor false"),
        ({"HVLAUNCH_NP": "2", "HVLAUNCH_NUM_PROC": "3"}, "HVLAUNCH_NUM_PROC and HVLAUNCH_NP are the same option"),
        ({"HVLAUNCH_X": "it's"}, "environment: HVLAUNCH_X: \"it's\": no closing quotation"),
        ({"HVLAUNCH_QUIET": "1", "HVLAUNCH_VERBOSE": "1"}, "environment: HVLAUNCH_VERBOSE: not allowed with HVLAUNCH_QUIET"),
        ({"HVLAUNCH_PROFILE": "a"}, "no file has a profile 'a'; try: [profiles.NAME] in hvlaunch.toml"),
        ({"HVLAUNCH_CONFIG_FILE": "none.toml"}, "none.toml: no such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_variable(environ, text):
    with pytest.raises(BadUsage) as caught:
        parse(["true"], environ=environ)
    assert text in str(caught.value)


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
