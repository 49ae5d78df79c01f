"""`hvlaunch doctor`: findings about this machine, with next steps, and nothing in them that should not be shown."""

import json
import os
import resource
from pathlib import Path

import pytest

from hvlaunch.cli.hosts import doctor
from hvlaunch.cli.hosts.doctor import (
    ReportLine,
    check_build,
    exit_code_of,
    launcher_version,
    package_version,
    report,
    ssh_version,
)
from hvlaunch.cli.main import main
from hvlaunch.cli.options.parser import JOB_WORDS
from hvlaunch.cli.pages.completion import after

SECTIONS = ["installation", "parts", "kernel", "limits", "jobs", "configuration", "hosts"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home directory, with the current directory in it; no option comes from elsewhere."""
    folder = tmp_path / "home-of-alice"
    (folder / "work").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(("HVLAUNCH_", "XDG_", "SLURM", "SSH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder / "work")
    return folder


def examine(capsys, *words):
    """The exit code and the findings."""
    code = main(["doctor", "--json", *words])
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == code
    return code, [ReportLine(**finding) for finding in answer["findings"]]


def named(findings, section, name):
    (finding,) = [finding for finding in findings if (finding.section, finding.name) == (section, name)]
    return finding


def test_a_sound_machine_is_described_and_stops_no_job(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    assert "\x1b" not in out
    assert out.startswith("hvlaunch ")
    assert "nothing here stops a job" in out.splitlines()[0]
    assert [line[:-1] for line in out.splitlines() if line.endswith(":") and line[0] != " "] == SECTIONS
    assert "try: hvlaunch doctor -H HOSTS" in out


def test_programs_get_each_finding_as_an_object(capsys):
    code, findings = examine(capsys)
    assert code == 0
    assert list(dict.fromkeys(finding.section for finding in findings)) == SECTIONS
    assert named(findings, "parts", "paramiko").level == "ok"


def test_all_that_is_not_well_has_a_next_step(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "parts", list)
    monkeypatch.setattr(
        doctor, "_FEATURES", [(*row[:1], lambda: False, *row[2:]) for row in doctor._FEATURES]
    )
    _, findings = examine(capsys, "-H", "nosuch.invalid")
    bad = [finding for finding in findings if finding.level in ("warning", "error")]
    assert [finding.name for finding in bad] == [*(row[0] for row in doctor._FEATURES), "nosuch.invalid"]
    assert all(finding.hint for finding in bad)


def test_a_missing_package_stops_jobs(capsys, monkeypatch):
    monkeypatch.setattr(
        "hvlaunch.cli.hosts.doctor.package_version",
        lambda name: None if name == "paramiko" else package_version(name),
    )
    code, findings = examine(capsys)
    finding = named(findings, "installation", "requirements")
    assert (code, finding.level, finding.text) == (2, "error", "missing: paramiko")
    assert finding.hint.endswith(" -m pip install paramiko")


@pytest.mark.parametrize(("limit", "level", "code"), [(16, "error", 2), (256, "warning", 0), (4096, "ok", 0)])
def test_the_limit_of_open_files(capsys, monkeypatch, limit, level, code):
    getrlimit = resource.getrlimit

    def limited(number):
        return (limit, limit) if number == resource.RLIMIT_NOFILE else getrlimit(number)

    monkeypatch.setattr(resource, "getrlimit", limited)
    exit_code, findings = examine(capsys)
    finding = named(findings, "limits", "open files")
    assert (exit_code, finding.level, finding.hint) == (
        code,
        level,
        None if level == "ok" else "ulimit -n 1024",
    )


def test_files_of_options_are_named_without_their_values(capsys, home, monkeypatch):
    (home / ".config/hvlaunch").mkdir(parents=True)
    (home / ".config/hvlaunch/config.toml").write_text('[ssh]\nssh-user = "sesame"\n')
    (home / "work/hvlaunch.toml").write_text(
        '[hosts]\nslots-per-host = 41\n[environment]\nx = ["A=sesame"]\n'
    )
    monkeypatch.setenv("HVLAUNCH_SSH_PORT", "54321")
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "~/.config/hvlaunch/config.toml: ssh-user" in out
    assert "hvlaunch.toml: slots-per-host" in out
    assert "environment: HVLAUNCH_SSH_PORT" in out
    assert "sesame" not in out
    assert "54321" not in out
    assert "home-of-alice" not in out
    assert os.uname().nodename not in out


def test_hosts_come_from_a_file_of_options_too(capsys, home):
    (home / "work/hvlaunch.toml").write_text('[hosts]\nhosts = "localhost:2"\n')
    code, findings = examine(capsys)
    finding = named(findings, "hosts", "localhost")
    assert (code, finding.level) == (0, "ok")
    assert finding.text.startswith("this machine; Python 3.")


def test_a_broken_file_of_options_is_a_finding_and_hosts_are_asked_all_the_same(capsys, home):
    (home / "work/hvlaunch.toml").write_text("[ssh\n")
    code, findings = examine(capsys, "-H", "localhost")
    finding = named(findings, "configuration", "options")
    assert (code, finding.level, finding.exit_code) == (2, "error", 2)
    assert finding.text.startswith("hvlaunch.toml: ")
    assert named(findings, "hosts", "localhost").level == "ok"


def test_a_file_that_others_can_change_is_a_warning(capsys, home):
    path = home / "work/hvlaunch.toml"
    path.write_text('[hosts]\nhosts = "localhost:2"\n')
    path.chmod(0o666)
    code, findings = examine(capsys)
    warnings = [finding for finding in findings if finding.level == "warning"]
    assert code == 0
    assert [(finding.section, "not used: hvlaunch.toml" in finding.text) for finding in warnings] == [
        ("configuration", True)
    ]


def test_a_missing_hostfile_is_an_error_of_the_hosts(capsys):
    code, findings = examine(capsys, "--hostfile", "nosuch")
    finding = named(findings, "hosts", "hosts")
    assert (code, finding.level) == (2, "error")
    assert "nosuch" in finding.text


def test_hosts_that_fail_are_69(capsys):
    code, findings = examine(capsys, "-H", "localhost,nosuch.invalid")
    assert code == 69
    assert [(finding.name, finding.level) for finding in findings if finding.section == "hosts"] == [
        ("localhost", "ok"),
        ("nosuch.invalid", "error"),
    ]


def test_the_first_error_decides_the_exit_code():
    well = ReportLine("a", "b", "ok", "")
    listed = [
        well,
        well._replace(level="warning"),
        *(well._replace(level="error", exit_code=code) for code in (69, 2)),
    ]
    assert exit_code_of(listed) == 69
    assert exit_code_of(listed[:2]) == 0
    assert report(listed).splitlines()[0].endswith(": 2 errors: a job would not run; 1 warning")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-np", "2"], "doctor: -np/--num-proc is for jobs"),
        (["--bogus"], "unknown option '--bogus'"),
        (["true"], "doctor: 'true' is not an option"),
        (["-H", "a:x"], "-H"),
    ],
)
def test_wrong_words_are_refused(capsys, words, cause):
    code = main(["doctor", *words])
    out, err = capsys.readouterr()
    if words[0] == "-H":
        assert (code, "error   hosts" in out) == (2, True)
    else:
        assert (code, out) == (2, "")
        assert cause in err


def test_a_state_directory_that_others_can_change(capsys, home):
    root = home / ".local/state/hvlaunch/jobs"
    root.mkdir(parents=True)
    root.chmod(0o777)
    code, findings = examine(capsys)
    finding = named(findings, "jobs", "directory")
    assert (code, finding.level) == (0, "warning")
    assert "every user of this machine can change it" in finding.text
    assert "chmod go-w ~/.local/state/hvlaunch/jobs" in finding.hint


def test_jobs_are_counted(capsys, home):
    root = home / ".local/state/hvlaunch/jobs"
    for name, result in (("0123456789ab", '{"exit_code": 1}'), ("ba9876543210", None)):
        (root / name).mkdir(parents=True, mode=0o700)
        (root / name / "about.json").write_text('{"began": 1.0}')
        if result:
            (root / name / "result.json").write_text(result)
    _, findings = examine(capsys)
    finding = named(findings, "jobs", "jobs")
    assert (finding.text, finding.hint) == ("0 jobs running, 1 ended, 1 without a driver", "hvlaunch jobs")
    assert named(findings, "jobs", "directory").text == "~/.local/state/hvlaunch/jobs, mode 755"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10.1.2.3 port 22: refused", "ADDRESS port 22: refused"),
        ("no route to fd00::12 (2001:db8:0:1::5)", "no route to ADDRESS (ADDRESS)"),
        ("192.0.2.7 is named", "192.0.2.7 is named"),
        ("since 12:30:05, version 1.2.3", "since 12:30:05, version 1.2.3"),
        ("SHA256:Nq4Eu+abc", "SHA256:Nq4Eu+abc"),
    ],
)
def test_addresses_that_the_user_did_not_name_are_hidden(text, shown):
    assert doctor._without_addresses(text, {"a", "192.0.2.7"}) == shown


def test_a_job_loads_neither_doctor_nor_practise():
    import subprocess
    import sys

    program = (
        "import sys\nfrom hvlaunch.cli.main import main\ncode = main(['-np', '1', 'true'])\n"
        "loaded = [name for name in sys.modules if 'doctor' in name or 'practise' in name or name.endswith('gloo.visit')]\n"
        "sys.exit(str(loaded) if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("done after")) == (0, 1), done.stderr


def test_the_home_is_not_searched_for_in_an_empty_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("HOME")
    listed = list(doctor.findings([], {}))
    assert exit_code_of(listed) == 0
    assert Path.cwd().exists()


def test_a_directory_that_was_removed_is_a_finding(capsys, home, monkeypatch):
    monkeypatch.delenv("PWD", raising=False)
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    code, findings = examine(capsys, "-H", "localhost")
    assert (code, named(findings, "hosts", "hosts").text) == (2, "the current directory is gone")


def test_completion_offers_the_words_and_options():
    assert after(JOB_WORDS["doctor"]) == "echo -H --hostfile --json --help"
    assert after(JOB_WORDS["practise"]) == "echo kill cut freeze slow host all --help"
    assert "--no-tls" in after(JOB_WORDS["top"])


def test_installed_parts_are_marked():
    text = check_build(
        {"paramiko": "5.1", "torch": "2.13.0+cpu", "httptools": "0.9"}.get,
        lambda: "OpenSSH_9.2p1",
        {"mpirun": "Open MPI 4.1.4"}.get,
    )
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("  [X]")}
    assert set(lines) == {"gloo", "mpirun", "paramiko", "ssh", "torch", "httptools"}
    assert "Open MPI 4.1.4" in lines["mpirun"]
    assert "  [ ] srun       not found" in text
    assert "5.1" in lines["paramiko"]
    assert "OpenSSH_9.2p1" in lines["ssh"]
    assert "  [ ] uvloop     not found" in text
    assert "Python 3." in text.splitlines()[0]


def test_missing_parts_are_not_marked():
    text = check_build(lambda name: None, lambda: None, lambda name: None)
    assert text.count("[X]") == 1
    assert text.count("[ ]") == 12


def test_this_installation():
    assert "[X] paramiko" in check_build()


def test_launchers_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher_version("mpirun") is None
    assert launcher_version("srun") is None
    for name, text in (("mpirun", 'echo "mpirun (Open MPI) 5.0.3"'), ("srun", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert launcher_version("mpirun") == "Open MPI 5.0.3"
    assert launcher_version("srun") == str(tmp_path / "srun")


def test_a_package_is_found_without_importing_it():
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package") is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'OpenSSH_9.2p1 Debian-2, OpenSSL 3.0' >&2", "OpenSSH_9.2p1"),
        ("echo 'OpenSSH_8.9p1, OpenSSL 3.0' >&2", "OpenSSH_8.9p1"),
        ("echo 'Sun_SSH_1.1'", "Sun_SSH_1.1"),
        ("echo 'unknown option' >&2; exit 255", None),
        ("true", None),
    ],
)
def test_the_ssh_binary_is_asked(tmp_path, script, expected):
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert ssh_version(str(program)) == expected


def test_no_ssh_binary(tmp_path):
    assert ssh_version(str(tmp_path / "none")) is None
