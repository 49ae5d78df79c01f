"""Which source wins, profiles, and where no other source than the command line counts."""

import re
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.api.given import spec_of as api_spec
from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.config import OTHERS, names_of
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage

SOURCES = ["your file", "the project's file", "the job's file", "variables", "the command line"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    directory = tmp_path / "home" / "project" / "src"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    return directory


def environ(here, **more):
    home = here.parents[1]
    return {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "xdg"), **more}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fill(here, *sources):
    """Each source says its number as -np; the words and the environment that this needs."""
    words, variables = [], {}
    if 0 in sources:
        write(here.parents[1] / "xdg/hvlaunch/config.toml", "np = 1\n")
    if 1 in sources:
        write(here.parent / "hvlaunch.toml", "np = 2\n")
    if 2 in sources:
        write(here / "job.yaml", "np: 3\n")
        words += ["--config-file", "job.yaml"]
    if 3 in sources:
        variables["HVLAUNCH_NP"] = "4"
    if 4 in sources:
        words += ["-np", "5"]
    return words, environ(here, **variables)


@pytest.mark.parametrize("weaker", range(5), ids=SOURCES)
@pytest.mark.parametrize("stronger", range(5), ids=SOURCES)
def test_the_stronger_of_two_sources_wins(weaker, stronger, here):
    words, variables = fill(here, weaker, stronger)
    assert parse([*words, "true"], environ=variables).np == max(weaker, stronger) + 1


def test_all_five_at_once(here):
    words, variables = fill(here, *range(5))
    assert parse([*words, "true"], environ=variables).np == 5
    assert parse([*words[:-2], "true"], environ=variables).np == 4


@pytest.mark.parametrize(
    "outer", [{"HVLAUNCH_JOB_ID": "5f0c2a9be471"}, {}], ids=["in a worker", "--isolated"]
)
def test_in_a_worker_only_the_command_line_and_its_files_count(outer, here):
    words, variables = fill(here, 0, 1, 2, 3)
    words = words if outer else [*words, "--isolated"]
    assert parse([*words, "true"], environ={**variables, **outer}).np == 3
    assert parse([*words[2:], "true"], environ={**variables, **outer}).np is None


def test_isolated_is_a_switch_that_can_be_taken_back(here):
    words, variables = fill(here, 0, 1, 3)
    assert parse([*words, "--no-isolated", "true"], environ=variables).np == 4
    assert parse([*words, "--isolated", "--no-isolated", "true"], environ=variables).np == 4
    assert parse([*words, "--no-isolated", "--isolated", "true"], environ=variables).np is None
    assert api_spec({"isolated": False}, ["true"], variables).hosts[0].slots == 4


def test_variables_of_an_outer_jobs_worker_set_no_options(here):
    """Some of a worker's variables are called as options are."""
    worker = {"HVLAUNCH_JOB_ID": "1", "HVLAUNCH_HOSTS": "a=10.0.0.1:2", "HVLAUNCH_WORKER_TIMEOUT": "30"}
    assert parse(["true"], environ=environ(here, **worker)).given == {}
    named = {name for group in GROUPS for option in group.options for name in names_of(option)}
    assert named & OTHERS == {
        "HVLAUNCH_HOST", "HVLAUNCH_HOSTS", "HVLAUNCH_LEASE", "HVLAUNCH_WORKER_TIMEOUT",
    }  # fmt: skip


def test_variables_with_another_meaning_are_listed():
    source = Path(hvlaunch.__file__).parent
    used = {
        name
        for path in source.rglob("*.py")
        if path.parent.name != "config"
        for name in re.findall(r"\"(HVLAUNCH_[A-Z_]+[A-Z])\"", path.read_text())
    }
    assert len(used) > 15
    assert used <= OTHERS


def test_only_a_variable_that_looks_mistyped_gets_a_warning(here):
    told: list[str] = []
    variables = {
        "HVLAUNCH_NUM_PORC": "2",
        "HVLAUNCH_HOME": "/opt",
        "HVLAUNCH_TOKEN": "x",
        "HVLAUNCH_VERSION": "3",
        "HVLAUNCH_NP": "",
    }
    assert parse(["true"], environ=environ(here, **variables), warn=told.append).given == {}
    assert told == ["warning: HVLAUNCH_NUM_PORC is not an option; try: HVLAUNCH_NUM_PROC"]


def test_a_variable_for_a_command_line_option_gets_a_warning(here):
    told: list[str] = []
    variables = {"HVLAUNCH_ISOLATED": "1", "HVLAUNCH_SHOW_CONFIG": "1", "HVLAUNCH_CHECK_BUILD": ""}
    assert parse(["true"], environ=environ(here, **variables), warn=told.append).given == {}
    assert told == [
        "warning: HVLAUNCH_ISOLATED is not read: isolated can't be set by a variable; try: --isolated on the command line",
        "warning: HVLAUNCH_SHOW_CONFIG is not read: show-config can't be set by a variable; try: --show-config on the command line",
    ]


@pytest.mark.parametrize("name", ["hvlaunch.toml", "pyproject.toml"])
def test_the_projects_file_is_the_first_upwards_and_not_above_the_home_directory(name, here):
    head = "[tool.hvlaunch]\n" if name == "pyproject.toml" else ""
    write(here.parents[2] / name, f"{head}np = 9\n")
    assert parse(["true"], environ=environ(here)).np is None
    write(here.parents[1] / name, f"{head}np = 8\n")
    assert parse(["true"], environ=environ(here)).np == 8
    for text in (
        "[tool.other]\nnp = 7\n# hvlaunch\n",
        "[tool.hvlaunch-other]\nnp = 7\n",
        "[tool.other-hvlaunch]\nnp = 7\n",
        "[tool.hvlaunch2]\nnp = 7\n",
        "[tool]\nother.np = 7\n# hvlaunch\n",
        "[tool.uv.sources]\nhvlaunch = { path = 'x' }\n",
    ):
        write(here.parent / "pyproject.toml", text)
        assert parse(["true"], environ=environ(here)).np == 8
    write(here / name, f"{head}np = 6\n")
    assert parse(["true"], environ=environ(here)).np == 6
    write(here / "hvlaunch.toml", "np = 5\n")
    assert parse(["true"], environ=environ(here)).np == 5


@pytest.mark.parametrize(
    "text",
    [
        "[tool.hvlaunch]\nnp = 2\n",
        "[tool.hvlaunch.workers]\nnp = 2\n",
        "[ tool . hvlaunch ]\nnp = 2\n",
        '["tool"."hvlaunch"]\nnp = 2\n',
        "tool.hvlaunch.np = 2\n",
        "tool = { hvlaunch = { np = 2 } }\n",
        "[tool]\nhvlaunch.np = 2\n",
        "[tool]\n[tool.hvlaunch]\nnp = 2\n",
    ],
)
def test_each_way_to_write_the_table_of_a_pyproject(text, here):
    before = "[project]\nname = 'x'\n" if text.startswith("[") else ""
    write(here / "pyproject.toml", before + text)
    assert parse(["true"], environ=environ(here)).np == 2


def test_paths_in_a_file_count_from_it(here):
    write(
        here.parent / "hvlaunch.toml", "cwd = '.'\nhostfile = 'hosts'\nenv-file = 'src/keys'\nx = {A = 'b'}\n"
    )
    write(here.parent / "hosts", "localhost slots=2\n")
    write(here / "keys", "B=c\n")
    spec, _ = job_spec(parse(["true"], environ=environ(here)), {})
    assert (spec.cwd, spec.hosts[0].slots, spec.env) == (str(here.parent), 2, {"A": "b", "B": "c"})


def test_variables_for_the_workers_add_up_and_other_lists_do_not(here):
    write(
        here / "hvlaunch.toml",
        "x = ['A=1', 'B=1']\nnetwork-interfaces = ['eth0', 'eth1']\n[profiles.p]\nx = {B = '2'}\n",
    )
    words = ["--profile", "p", "-x", "C=3", "--network-interfaces", "ib0", "true"]
    options = parse(words, environ=environ(here, HVLAUNCH_X="D=4"))
    assert options.x == ["A=1", "B=1", "B=2", "D=4", "C=3"]
    assert options.network_interfaces == ["ib0"]
    assert job_spec(options, {})[0].env == {"A": "1", "B": "2", "C": "3", "D": "4"}


def test_a_stronger_source_replaces_an_option_that_excludes_its_own(here):
    write(here / "hvlaunch.toml", "hosts = 'a,b'\nmpi = true\nverbose = true\n")
    options = parse(["--hostfile", "f", "--gloo", "--quiet", "true"], environ=environ(here))
    assert (options.hosts, options.hostfile, options.launcher) == (None, "f", None)
    assert (options.verbose, options.quiet) == (False, True)
    assert parse(["--no-mpi", "true"], environ=environ(here)).launcher is None
    assert parse(["--no-srun", "true"], environ=environ(here)).launcher == "mpirun"


def test_a_profile_overrides_its_file_but_not_a_stronger_file(here):
    write(
        here.parents[1] / "xdg/hvlaunch/config.toml",
        "grace = 1\n[profiles.gpu8]\ngrace = 2\nlease = 2\nsettle = 2\n",
    )
    write(here / "job.yaml", "lease: 3\nprofiles:\n  gpu8:\n    ending: {settle: 3}\n  cpu: {settle: 4}\n")
    words = ["--config-file", "job.yaml", "--profile", "gpu8", "true"]
    options = parse(words, environ=environ(here))
    assert (options.grace, options.lease, options.settle) == (2, 3, 3)
    with pytest.raises(BadUsage, match="no file has a profile 'gpu'; try: cpu, gpu8"):
        parse([*words[:3], "gpu", "true"], environ=environ(here))
    write(here.parents[1] / "xdg/hvlaunch/config.toml", "profile = 'cpu'\n")
    assert parse([*words[:2], "true"], environ=environ(here)).settle == 4
    assert parse([*words[:2], "true"], environ=environ(here, HVLAUNCH_PROFILE="gpu8")).settle == 3


def test_the_command_of_a_file_is_for_lines_without_one(here):
    write(here / "hvlaunch.toml", "command = 'python train.py \"a b\"'\n")
    assert parse([], environ=environ(here)).command == ("python", "train.py", "a b")
    assert parse(["true"], environ=environ(here)).command == ("true",)
    with pytest.raises(BadUsage, match="no command to run"):
        parse(["--isolated"], environ=environ(here))


def test_a_bom_windows_line_ends_and_dashes_or_underscores_are_fine(here):
    (here / "job.toml").write_bytes(b"\xef\xbb\xbf[elastic_jobs]\r\nmin_np = 2\r\nmax-np = 4\r\n")
    options = parse(["--config-file", "job.toml", "true"], environ=environ(here))
    assert (options.min_np, options.max_np) == (2, 4)


def test_without_a_home_or_a_directory_nothing_is_read(here):
    here.rmdir()
    assert parse(["true"], environ={}).given == {}


def test_a_wrong_file_stops_no_report_and_no_help(here):
    write(here / "hvlaunch.toml", "wrong")
    assert parse(["--check-build"], environ=environ(here)).check_build
    with pytest.raises(Answered):
        parse(["--help"], environ=environ(here))
    with pytest.raises(BadUsage, match=r"hvlaunch\.toml: expected"):
        parse(["true"], environ=environ(here))
