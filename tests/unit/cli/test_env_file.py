"""Files of variables: the rules of quoting, and errors that name file and line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.cli.env_file import EnvLine, parse_env_file, read_env_file
from hvlaunch.errors import BadUsage


def values(text):
    return {line.name: line.value for line in parse_env_file(text, source="f")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("\n  \n# A=1\n\t# B=2\n#", {}),
        ("A=1", {"A": "1"}),
        ("A=1\nB=2\n", {"A": "1", "B": "2"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("A=1\nA=2", {"A": "2"}),
        ("  A=1", {"A": "1"}),
        ("export A=1", {"A": "1"}),
        ("export\tA=1", {"A": "1"}),
        ("exporter=1", {"exporter": "1"}),
        ("A", {"A": None}),
        ("export A # as it is here", {"A": None}),
        ("A=", {"A": ""}),
        ("A=   ", {"A": ""}),
        ("A= b c \t", {"A": "b c"}),
        ("A=b=c", {"A": "b=c"}),
        ("A=b # comment", {"A": "b"}),
        ("A=b#c", {"A": "b#c"}),
        ("A=#b", {"A": "#b"}),
        ("A= # comment", {"A": ""}),
        (r"A=C:\new $HOME `x`", {"A": r"C:\new $HOME `x`"}),
        ("A=it's", {"A": "it's"}),
        ("A=''", {"A": ""}),
        ("A=' b # c '", {"A": " b # c "}),
        (r"A='\n $X \\'", {"A": r"\n $X \\"}),
        ("A='two\nlines' # comment\nB=2", {"A": "two\nlines", "B": "2"}),
        ('A=""', {"A": ""}),
        ('A=" b # c "', {"A": " b # c "}),
        ('A= "b"', {"A": "b"}),
        (r'A="a\nb\tc\rd"', {"A": "a\nb\tc\rd"}),
        (r'A="\" \\ \$ \`"', {"A": '" \\ $ `'}),
        (r'A="\d \0"', {"A": r"\d \0"}),
        ('A="$HOME"', {"A": "$HOME"}),
        ('A="two\nlines"\nB=2', {"A": "two\nlines", "B": "2"}),
        ('A="one \\\nline"', {"A": "one line"}),
        ('A="it\'s"', {"A": "it's"}),
        ("A=ü\udcff", {"A": "ü\udcff"}),
    ],
)
def test_values(text, expected):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("=1", "f:1", "not NAME=VALUE"),
        ("A=1\n\n# c\n=2", "f:4", "not NAME=VALUE"),
        ("A = 1", "f:1", "not NAME=VALUE"),
        ("A B", "f:1", "not NAME=VALUE"),
        ("'A'=1", "f:1", "not NAME=VALUE"),
        ("A='x", "f:1", "no closing quote"),
        ('B=1\nA="x\ny\nz', "f:2", "no closing quote"),
        (r'A="x\"', "f:1", "no closing quote"),
        ("A='x\ny'\nB='z' z", "f:3", "text after the closing quote"),
        ("A='x''y'", "f:1", "text after the closing quote"),
    ],
)
def test_an_error_names_file_and_line(text, where, cause):
    with pytest.raises(BadUsage) as caught:
        parse_env_file(text, source="f")
    assert str(caught.value).startswith(f"{where}: {cause}")


def test_line_numbers_count_from_one_over_comments_and_quoted_newlines():
    lines = parse_env_file("# c\nA='x\ny'\n\nB=2", source="f")
    assert lines == [EnvLine(2, "A", "x\ny"), EnvLine(5, "B", "2")]


def in_double_quotes(value):
    for char in '\\"':
        value = value.replace(char, f"\\{char}")
    return f'"{value}"'


@given(st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_every_value_survives_double_quotes(contents):
    text = "\n".join(f"V{index}={in_double_quotes(value)} # c" for index, value in enumerate(contents))
    assert list(values(text).values()) == contents


@given(st.lists(st.text(st.characters(exclude_characters="\0'"))))
def test_every_value_without_an_apostrophe_survives_single_quotes(contents):
    text = "\n".join(f"export V{index}='{value}'" for index, value in enumerate(contents))
    assert list(values(text).values()) == contents


@given(st.text())
def test_any_text_is_read_or_refused_with_its_line(text):
    try:
        lines = parse_env_file(text, source="f")
    except BadUsage as error:
        assert str(error).startswith("f:")
    else:
        assert all(line.name and "=" not in line.name for line in lines)


def test_reading_keeps_all_bytes_and_drops_the_byte_order_mark(tmp_path):
    path = tmp_path / "env"
    path.write_bytes(b"\xef\xbb\xbfA=\xff\xc3\xbc\n")
    assert read_env_file(path) == [EnvLine(1, "A", "\udcffü")]


def test_ten_thousand_lines_with_one_of_120_000_bytes(tmp_path):
    path = tmp_path / "env"
    path.write_text("".join(f"V{n}={n}\n" for n in range(10_000)) + f'LONG="{"x" * 120_000}"\n')
    lines = read_env_file(path)
    assert len(lines) == 10_001
    assert lines[-1] == EnvLine(10_001, "LONG", "x" * 120_000)


@pytest.mark.parametrize(("name", "cause"), [("missing", "no such file"), (".", "is a directory")])
def test_a_file_that_can_not_be_read(tmp_path, name, cause):
    with pytest.raises(BadUsage, match=cause) as caught:
        read_env_file(tmp_path / name)
    assert str(caught.value).startswith(f"--env-file {tmp_path}")
