"""What a worker is when it starts: its environment, its command, its signals, its files."""

import ast
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.harness import AgentProcess, python

Launch = Callable[..., AgentProcess]
SHOW_ENV = python("import os, sys; sys.stdout.write(repr(dict(os.environb)))")
SHOW_ARGV = "import os, sys; sys.stdout.write(repr([os.fsencode(word) for word in sys.argv[1:]]))"
ODD_VALUES = {
    "QUOTES": 'it\'s "so" `x` $HOME ${HOME} $(date) \\n !! %s',
    "NEWLINES": "\na\n\nb\r\n\t",
    "EMPTY": "",
    "EQUALS": "a=b=c=",
    "UNICODE": "héllo ☃ 🎉",
    "BYTES": b"\xff\xfe caf\xe9".decode("utf-8", "surrogateescape"),
    "CONTROL": "".join(map(chr, range(1, 32))) + "\x7f",
    "with.dot-and space": "1",
}


def as_bytes(env: dict[str, str]) -> dict[bytes, bytes]:
    return {
        name.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
        for name, value in env.items()
    }


def environment(agent: AgentProcess, **options: Any) -> dict[bytes, bytes]:
    header, out, err = agent.run(SHOW_ENV, **options)
    assert header["code"] == 0, err
    found: dict[bytes, bytes] = ast.literal_eval(out.decode())
    return found


def test_each_layer_of_the_environment_hides_the_one_below(launch: Launch) -> None:
    layers = ("default", "host", "env", "own")
    names = [f"L{number}" for number in range(4)]
    given = [dict.fromkeys(names[number:], layer) for number, layer in enumerate(layers)]
    agent = launch(env=given[1])
    agent.hello()
    found = environment(agent, defaults=given[0], env=given[2], own=given[3])
    assert [found[name.encode()].decode() for name in names] == list(layers)


@pytest.mark.parametrize(
    ("host", "job"), [({}, {}), ({"P": "/host"}, {}), ({"P": "/host"}, {"P": "/job"}), ({"P": ""}, {})]
)
def test_paths_stand_before_and_behind_the_workers_own(
    launch: Launch, host: dict[str, str], job: dict[str, str]
) -> None:
    agent = launch(env=host)
    agent.hello()
    found = environment(agent, env=job, first={"P": "/first"}, last={"P": "/last"})
    own = job.get("P") or host.get("P")
    assert found[b"P"].decode().split(":") == ["/first", *([own] if own else []), "/last"]


def test_the_python_of_the_workers_is_looked_at_if_the_driver_asks(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin/python").touch(mode=0o755)
    (tmp_path / "lib/python3.12/site-packages/hvlaunch-9.dist-info").mkdir(parents=True)
    agent = launch(env={"PATH": f"{tmp_path}/bin"})
    assert agent.hello(python=("python", None))["facts"]["packages"] == {"hvlaunch": "9", "editable": []}
    agent = launch()
    assert agent.hello(python=("python", "/nowhere"))["facts"]["packages"] is None
    agent = launch()
    assert "packages" not in agent.hello()["facts"]


def test_odd_values_arrive_unchanged(agent: AgentProcess) -> None:
    found = environment(agent, env=ODD_VALUES)
    assert {name: found[name] for name in as_bytes(ODD_VALUES)} == as_bytes(ODD_VALUES)


def test_ten_thousand_variables_and_a_long_one_arrive_unchanged(agent: AgentProcess) -> None:
    env = {f"VARIABLE_{number}": f"value {number}" for number in range(10_000)}
    env["LONG"] = "x" * 120_000
    found = environment(agent, env=env)
    assert {name: found[name] for name in as_bytes(env)} == as_bytes(env)


@pytest.mark.parametrize("encoding", ["C", "POSIX", "ISO-8859-1"])
def test_the_hosts_locale_changes_nothing(launch: Launch, tmp_path: Path, encoding: str) -> None:
    """The host's own variables too: they may be in any encoding."""
    host = {"LC_ALL": encoding, "OF_THE_HOST": "\udcff é"}
    if encoding == "ISO-8859-1":
        if shutil.which("localedef") is None:
            pytest.skip("no localedef here")
        command = ["localedef", "-i", "en_US", "-f", encoding, str(tmp_path / "en_US.ISO-8859-1")]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no locale sources here")
        host |= {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(tmp_path)}
    agent = launch(env=as_bytes(host))
    agent.hello()
    found = environment(agent, env=ODD_VALUES)
    expected = as_bytes(ODD_VALUES | host)
    assert {name: found[name] for name in expected} == expected


def test_the_command_arrives_unchanged(agent: AgentProcess) -> None:
    words = [*ODD_VALUES.values(), "-x", "--", "*", "~", "a b"]
    _, out, err = agent.run(python(SHOW_ARGV, *words))
    expected = [word.encode("utf-8", "surrogateescape") for word in words]
    assert ast.literal_eval(out.decode()) == expected, err


def test_a_host_with_odd_entries_in_its_environment_still_starts_workers(launch: Launch) -> None:
    """Entries that no shell can make, but execve(2) takes."""
    odd = python("import os, sys; os.execve(sys.argv[1], sys.argv[1:], {b'ok': b'1', b'a b': b'\\xff'})")
    agent = launch(shell=[*odd, "/bin/sh", "-c"])
    agent.hello()
    assert environment(agent)[b"ok"] == b"1"


def not_started(agent: AgentProcess, argv: list[str], **options: Any) -> tuple[int, str]:
    agent.start(argv, **options)
    header, _ = agent.expect("not_started", round=0, slot=0)
    return header["code"], header["cause"]


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_missing_command_is_127(agent: AgentProcess) -> None:
    assert not_started(agent, ["no-such-command"], env={"PATH": "/usr/bin:/bin"}) == (
        127,
        "no-such-command: command not found (PATH=/usr/bin:/bin)",
    )
    assert not_started(agent, ["/no/such/file"]) == (127, "/no/such/file: command not found")
    assert not_started(agent, ["/etc/passwd/x"]) == (127, "/etc/passwd/x: command not found")
    assert not_started(agent, [""]) == (127, "the command is empty")
    assert not_started(agent, []) == (127, "the command is empty")


def test_a_file_that_cant_be_executed_is_126(agent: AgentProcess, tmp_path: Path) -> None:
    plain = script(tmp_path / "plain", "echo", 0o644)
    assert not_started(agent, [plain]) == (126, f"{plain}: permission denied")
    assert not_started(agent, ["plain"], env={"PATH": str(tmp_path)}) == (126, f"{plain}: permission denied")
    assert not_started(agent, [str(tmp_path)]) == (126, f"{tmp_path}: is a directory")
    empty = script(tmp_path / "text", "echo no first line\n")
    assert not_started(agent, [empty]) == (126, f"{empty}: exec format error")


def test_script_with_a_missing_interpreter_is_127(agent: AgentProcess, tmp_path: Path) -> None:
    path = script(tmp_path / "script", "#!/no/such/interpreter\n")
    assert not_started(agent, [path]) == (127, f"{path}: its interpreter (first line) was not found")


def test_the_program_is_found_by_the_workers_own_path(agent: AgentProcess, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    script(tmp_path / "first" / "program", "#!/bin/sh\necho no\n", 0o644)
    script(tmp_path / "program", "#!/bin/sh\necho right\n")
    path = f"{tmp_path}/first:{tmp_path}/missing:{tmp_path}:/bin:/usr/bin"
    assert agent.run(["program"], env={"PATH": path})[1] == b"right\n"


def test_a_program_is_found_from_the_working_directory(launch: Launch, tmp_path: Path) -> None:
    script(tmp_path / "here", "#!/bin/sh\necho here\n")
    agent = launch()
    agent.hello(cwd=str(tmp_path))
    assert agent.run(["./here"])[1] == b"here\n"
    assert agent.run(["here"], env={"PATH": ":/bin"})[1] == b"here\n"


def test_too_long_string_is_named(agent: AgentProcess) -> None:
    limit = 32 * resource.getpagesize()
    code, cause = not_started(agent, ["true"], env={"HUGE": "x" * limit})
    assert code == 126
    assert (
        cause == f"variable HUGE has {limit + 6} bytes; this kernel allows {limit} for one string (execve(2))"
    )
    code, cause = not_started(agent, ["true", "ok", "y" * limit])
    assert cause == f"argument 2 has {limit + 1} bytes; this kernel allows {limit} for one string (execve(2))"


def test_too_large_environment_is_reported_with_its_size(agent: AgentProcess) -> None:
    many = {f"V{number}": "x" * 100_000 for number in range(100)}
    code, cause = not_started(agent, ["true"], env=many)
    assert code == 126
    assert "command and environment have 10" in cause
    assert "ulimit -s" in cause


@pytest.mark.parametrize("word", ["nul\0inside", "\ud800"])
def test_words_with_null_bytes_are_reported(agent: AgentProcess, word: str) -> None:
    code, cause = not_started(agent, ["true", word], env={"PATH": "/usr/bin:/bin"})
    assert code == 126
    assert cause.startswith("/usr/bin/true: ")
    assert agent.run(["true"])[0]["code"] == 0


def test_failed_start_does_not_keep_other_workers_from_starting(agent: AgentProcess) -> None:
    agent.start(["true"], workers=3)
    for slot in range(3):
        agent.expect("started", slot=slot)
        assert agent.expect("exited", slot=slot)[0]["code"] == 0


def test_host_without_free_descriptors_reports_it(launch: Launch) -> None:
    agent = launch(before="ulimit -n 40; ")
    agent.hello()
    agent.start(["sleep", "60"], workers=40)
    header, _ = agent.expect("not_started")
    assert header["code"] == 126
    assert "too many open files" in header["cause"]
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)


SHOW_SIGNALS = ["/bin/grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]


@pytest.mark.parametrize(
    "ignored", [[], [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE]]
)
def test_signals_are_at_their_defaults(launch: Launch, ignored: list[signal.Signals]) -> None:
    """Whatever Python, the shell or a nohup above had ignored or blocked."""
    above = python(
        "import os, signal, sys\n"
        f"for number in {[int(one) for one in ignored]}: signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    agent = launch(shell=[*above, "/bin/sh", "-c"])
    agent.hello()
    _, out, _ = agent.run(SHOW_SIGNALS)
    sets = [int(line.split(b":")[1], 16) for line in out.splitlines()]
    assert len(sets) == 2
    assert [number for one in sets for number in signal.valid_signals() if one >> (number - 1) & 1] == []


def test_a_worker_of_a_broken_pipe_dies_quietly(agent: AgentProcess) -> None:
    header, out, err = agent.run(["/bin/sh", "-c", "yes | head -n 1"])
    assert (header["code"], out, err) == (0, b"y\n", b"")


def test_no_file_leaks_into_a_worker(agent: AgentProcess) -> None:
    code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])"
    agent.start(python(code), workers=3, stdin=True)
    for slot in range(3):
        agent.expect("exited", slot=slot)
        assert agent.output("stdout", slot) == b"[0, 1, 2]\n"


def test_every_worker_has_a_session_of_its_own_and_no_terminal(agent: AgentProcess) -> None:
    code = "import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"
    assert agent.run(python(code))[1] == b"True\n"


def test_started_has_the_pid(agent: AgentProcess) -> None:
    agent.start(["/bin/sh", "-c", "echo $$"], round_number=7)
    header, _ = agent.expect("started", round=7, slot=0)
    agent.expect("exited", round=7)
    assert int(agent.output()) == header["pid"]


def test_a_worker_without_stdin_reads_an_empty_one(agent: AgentProcess) -> None:
    assert agent.run(["cat"])[1] == b""
    assert agent.run(["readlink", "/proc/self/fd/0"])[1] == f"{os.devnull}\n".encode()


def test_the_agents_umask_and_niceness_are_the_workers(launch: Launch) -> None:
    agent = launch(before="umask 027; ")
    agent.hello()
    assert agent.run(["/bin/sh", "-c", "umask"])[1].strip() == b"0027"


def test_worker_that_calls_a_function_has_a_pipe_for_the_result(launch: Launch) -> None:
    """And the program that came for it, in parts."""
    agent = launch()
    scratch = agent.hello()["scratch"]
    for part in (b"first, ", b"second"):
        agent.send("call", part)
    code = "import os; os.write(3, open(os.environ['CALL'], 'rb').read())"
    agent.start(python(code), result=True, own={"CALL": f"{scratch}/call"})
    agent.expect("exited", slot=0, code=0)
    assert agent.output("result") == b"first, second"


def test_other_workers_have_no_pipe_for_a_result(agent: AgentProcess) -> None:
    _, out, _ = agent.run(python("import os; print(os.path.exists('/proc/self/fd/3'))"))
    assert out == b"False\n"
