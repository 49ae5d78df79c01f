"""The guardian of a container, on the host: pulls the image, starts the agent inside, and ends the container afterwards.

The agent inside has a guardian of its own, and both end by themselves as on any host. The guardian outside handles two more
cases: killing the runtime's client does not end its container, and a paused container can't end itself.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import select
import subprocess
import time

from hvlaunch.agent import reaper, scratch
from hvlaunch.agent.guardian import MORE, wait_for
from hvlaunch.agent.quick import prctl, signal, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

    Mount = Tuple[str, str, bool]

__all__ = ["CAUSE", "HINT", "PROGRESS", "container_command", "main"]

PROGRESS = "hvlaunch container: "
"""Begins a line on stdout about the progress of the image, before the agent has the channel."""
CAUSE, HINT = "hvlaunch container failed: ", "hvlaunch container hint: "
"""Begin the last two lines on stderr after a failed start."""
_EXIT_FAILED = 69
_RUNTIMES = ("docker", "podman", "apptainer", "singularity")
_WITHOUT_DAEMON = ("apptainer", "singularity")
"""Runtimes whose containers are ordinary descendants, without a name."""
_PATIENCE = 60.0  # seconds for a question to the runtime
_SIGN = 5.0  # seconds between signs of life while the image is pulled
_LAST_STEPS = 5.0  # seconds in which podman's monitor removes an ended container
_TAIL = 3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15  # prctl(2)
_LAYER = re.compile(r"\b[0-9a-f]{12,64}\b")
_LAYER_DONE = re.compile(r"\b(?:complete|exists|done|skipped)\b", re.IGNORECASE)
_NO_CONTAINER = re.compile(r"no such container|no container with", re.IGNORECASE)
# Kills the processes with the mark; for a container that goes on, where nothing else tells the job's from others.
_SWEEP = """\
import os, sys, time
mark, end = sys.argv[1].encode(), time.monotonic() + 5
def marked(pid):
    try:
        with open("/proc/%s/environ" % pid, "rb") as file:
            return mark in file.read().split(b"\\0")
    except OSError:
        return False
while time.monotonic() < end:
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid() and marked(pid)]
    if not pids:
        break
    for number in (19, 9):
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                pass
    time.sleep(0.01)
"""


class _CannotRun(Exception):
    def __init__(self, cause: str, hint: str) -> None:
        super().__init__(cause)
        self.cause, self.hint = cause, hint


def main(config: Dict[str, Any], options: Dict[str, Any]) -> NoReturn:
    """Start the agent in a container, wait for its end, and exit with its status. Never returns.

    `config` has `grace` and `lease` in seconds. `options` have `image` or `name` (of a running container), `runtime`, `mounts`,
    `cwd`, `is_bound`, and `script`, the shell's words for the agent. With `joins` the script joins a running agent.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)  # the timer of the start: pulling an image takes longer
    # As in guardian.py, in whose place it stands.
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NAME, b"hvl-guardian")
    reaper.adopt_descendants()
    try:
        runtime = _runtime(options)
        if options.get("joins"):
            os.execvp(runtime, [runtime, "exec", "-i", options["name"], "/bin/sh", "-c", options["script"]])
        if options["image"] is not None:
            _bring_image(runtime, options["image"])
        _Container(runtime, options, float(config["grace"]) + float(config["lease"]) + MORE).run()
    except _CannotRun as error:
        _write(2, "%s%s\n%s%s\n" % (CAUSE, error.cause, HINT, error.hint))
        os._exit(_EXIT_FAILED)


def _write(fd: int, text: str) -> None:
    try:
        os.write(fd, text.encode("utf-8", "replace"))
    except OSError:
        pass


class _Container:
    """A container from its start to its end; `patience` is the time in seconds for which its agent may be silent."""

    def __init__(self, runtime: str, options: Dict[str, Any], patience: float) -> None:
        self._runtime = runtime
        self._image: Optional[str] = options["image"]
        self._patience = patience
        # The directory's name is random, and so it names the container too.
        self._scratch = scratch.make()
        # Not below the first: the agent removes that one from within, where other directories may be mounted in this one.
        self._home = self._scratch + "-home"
        self._name: str = options["name"] or os.path.basename(self._scratch)
        self._mark = "HVL_CONTAINER=%s" % (self._scratch if self._image else os.path.basename(self._scratch))
        self._life = 0.0
        self._is_silent = False
        self._options = options

    def run(self) -> NoReturn:
        """Never returns. Raises _CannotRun."""
        try:
            argv = self._argv()
        except _CannotRun:
            self._remove_directories()
            raise
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                # Without its client, the container loses its connection, as if the network were cut.
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.execvp(argv[0], argv)
            finally:
                os._exit(126)
        silence, _keep = os.pipe()
        status = wait_for(child, silence, self._patience, self._shows_life)
        # In a running container the agent sees the end of its client as a lost connection, and ends what is its own.
        if not (os.WIFSIGNALED(status) and self._image is None):
            if status != 0:
                self._end()
            self._let_monitor_end()
        left = len(reaper.kill_descendants(self._patience))
        self._remove_directories()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            _write(2, "hvlaunch agent: %s's client was killed by %s\n" % (self._runtime, signal_name(number)))
            os._exit(128 + number)
        os._exit(os.WEXITSTATUS(status) or int(left > 0))

    def _remove_directories(self) -> None:
        scratch.remove(self._scratch)
        scratch.remove(self._home)

    def _argv(self) -> List[str]:
        script = ["/bin/sh", "-c", self._options["script"]]
        if self._image is None:
            return [self._runtime, "exec", "-i", "-e", self._mark, self._name, *script]
        is_rootless, is_bound = _is_rootless(self._runtime), bool(self._options["is_bound"])
        return container_command(
            self._runtime,
            self._image,
            self._name,
            _mounts(self._options, self._scratch, "" if self._runtime in _WITHOUT_DAEMON else self._home),
            [
                *_identity(self._runtime, is_rootless=is_rootless),
                *_devices(self._runtime),
                *_limits(self._runtime, is_rootless=is_rootless, is_bound=is_bound),
            ],
            {"HVL_CONTAINER": self._scratch, **_home_variables()},
            script,
        )

    def _shows_life(self) -> bool:
        """True if the agent has shown life since the last call, or can't show any here."""
        # The agent sets the time of its directory with each ping; it may have another connection by now.
        if self._image is None:
            return True
        before, self._life = self._life, os.stat(self._scratch).st_mtime
        self._is_silent = before == self._life
        return not self._is_silent

    def _end(self) -> None:
        """End the processes left by a killed agent or client."""
        if self._runtime in _WITHOUT_DAEMON:
            return
        if _is_closed(0) and not self._is_silent:
            # The client may have ended with its pipes. The agent waits for another connection; its lease runs.
            if self._image is None:
                return
            waiting = subprocess.Popen(
                [self._runtime, "wait", self._name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            deadline = time.monotonic() + self._patience
            while waiting.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                if self._shows_life():
                    deadline = time.monotonic() + self._patience
            waiting.kill()
        if self._image is None:
            # The same Python as the agent's is not known here; any will do.
            script = (
                'for p in python3 python; do command -v $p >/dev/null && exec $p -I -S -c "$0" "$1"; done'
            )
            _ask([self._runtime, "exec", self._name, "/bin/sh", "-c", script, _SWEEP, self._mark])
            return
        deadline = time.monotonic() + self._patience
        force = ["-f", "-t", "0"] if self._runtime == "podman" else ["-f"]
        # The daemon may be starting again.
        while time.monotonic() < deadline:
            code, output = _ask([self._runtime, "rm", *force, self._name])
            if code == 0 or _NO_CONTAINER.search(output):
                return
            time.sleep(0.5)
        _write(2, "hvlaunch agent: container %s can't be removed: %s\n" % (self._name, output.strip()[-300:]))

    def _let_monitor_end(self) -> None:
        """Give podman's monitor, now a child, time to remove the container."""
        deadline = time.monotonic() + _LAST_STEPS
        try:
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
        except ChildProcessError:
            pass


def _is_closed(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLHUP | select.POLLRDHUP)
    return bool(poll.poll(0))


def _ask(argv: List[str]) -> Tuple[int, str]:
    """Run a command of the runtime; return its exit code and output."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "%s does not answer within %g s" % (argv[0], _PATIENCE)
    except OSError as error:
        return 127, "%s: %s" % (argv[0], os.strerror(error.errno or 0).lower())
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " ".join(lines[-1:])[:300] or "it printed nothing"


def _runtime(options: Dict[str, Any]) -> str:
    """Return the user's runtime, else the first of this host with the container or able to start a container. Raises _CannotRun."""
    import shutil  # noqa: PLC0415 (8 ms, on hosts with containers)

    image, name = options["image"], options["name"]
    chosen: Optional[str] = options["runtime"]
    if chosen is not None:
        candidates = [chosen, "singularity"] if chosen == "apptainer" else [chosen]
    elif image is not None and image.endswith(".sif"):
        candidates = list(_WITHOUT_DAEMON)
    else:
        candidates = list(_RUNTIMES)
    usable = [runtime for runtime in candidates if shutil.which(runtime)]
    if not usable:
        raise _CannotRun(
            "%s is not installed" % " or ".join(candidates), "install one of them there, or another --runtime"
        )
    if name is None:
        return usable[0]
    outputs = []
    for runtime in usable:
        if runtime not in _WITHOUT_DAEMON:
            code, output = _ask([runtime, "container", "inspect", "--format", "{{.State.Running}}", name])
            if code == 0 and output.strip() == "true":
                return runtime
            outputs.append("%s: %s" % (runtime, "it is not running" if code == 0 else _last_line(output)))
    raise _CannotRun(
        "no running container %s (%s)" % (name, "; ".join(outputs)), "docker ps, or podman ps, on that host"
    )


def _bring_image(runtime: str, image: str) -> None:
    """Pull the image unless it is here. Raises _CannotRun."""
    if runtime in _WITHOUT_DAEMON:
        if image.endswith(".sif") and not os.path.exists(os.path.expanduser(image)):
            raise _CannotRun("no image %s" % image, "--bring %s:PATH, or a path that the host has" % image)
        return
    code, output = _ask([runtime, "image", "inspect", image])
    if code == 0:
        return
    if not re.search(r"no such image|not known|no such object|not found", output, re.IGNORECASE):
        raise _CannotRun(
            "%s does not answer: %s" % (runtime, _last_line(output)),
            "%s info on that host: is its daemon running, and may this user reach it?" % runtime,
        )
    pull = subprocess.Popen(
        [runtime, "pull", image], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    tail = _follow(pull)
    if pull.wait() != 0:
        raise _CannotRun(
            "image %s can't be pulled: %s" % (image, " | ".join(tail) or "%s printed nothing" % runtime),
            "%s pull %s on that host: check the name, its network, and %s login" % (runtime, image, runtime),
        )


def _follow(pull: subprocess.Popen[bytes]) -> List[str]:
    """Report the progress of the image until the end of the output; return the last lines. End with the connection."""
    output = pull.stdout.fileno() if pull.stdout is not None else -1
    poll = select.poll()
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    poll.register(output, select.POLLIN)
    layers: Dict[str, bool] = {}
    lines: List[str] = []
    incomplete, stage, due = b"", "", 0.0
    while True:
        ready = [fd for fd, _ in poll.poll(_SIGN * 1000)]
        if 0 in ready:
            pull.kill()
            os._exit(_EXIT_FAILED)
        if output in ready:
            data = os.read(output, 1 << 16)
            if not data:
                return lines[-_TAIL:]
            *complete, incomplete = (incomplete + data).replace(b"\r", b"\n").split(b"\n")
            for line in (part.decode("utf-8", "replace").strip() for part in complete):
                if line:
                    lines = [*lines[-_TAIL:], line[:300]]
                for layer in _LAYER.findall(line)[:1]:
                    layers[layer] = layers.get(layer, False) or bool(_LAYER_DONE.search(line))
        new = "image: %d of %d layers" % (sum(layers.values()), len(layers))
        if new != stage or time.monotonic() >= due:
            stage, due = new, time.monotonic() + _SIGN
            _write(1, "%s%s\n" % (PROGRESS, stage))


def _user() -> Tuple[str, str]:
    """Return this user's name and home."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), os.path.expanduser("~")
    return entry.pw_name, os.path.expanduser("~")


def _home_variables() -> Dict[str, str]:
    # The image has no entry for this user: getpass.getuser() and torch's caches take these.
    name, home = _user()
    return {"HOME": home, "USER": name, "LOGNAME": name}


def _mounts(options: Dict[str, Any], directory: str, backing: str) -> List[Mount]:
    """Return the files of this host for the container: source, target, and whether read-only. Raises _CannotRun.

    `directory` is the agent's, `backing` is made as a home of the container; empty if the runtime mounts the user's.
    """
    home = _user()[1]
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "hvlaunch")
    os.makedirs(cache, 0o700, exist_ok=True)
    places: Dict[str, Mount] = {directory: (directory, directory, False)}
    inner_cache = os.path.join(home, ".cache", "hvlaunch")
    places[inner_cache] = (cache, inner_cache, False)
    for path in filter(None, (options["cwd"], options["to"])):
        place = os.path.join(home, os.path.expanduser(path))
        if path == options["to"]:
            os.makedirs(place, exist_ok=True)
        # A missing directory is reported by the agent, as on any host; the root is the image's.
        if os.path.isdir(place) and place != "/":
            places[place] = (place, place, False)
    for source, target, is_readonly in options["mounts"]:
        here = os.path.join(home, os.path.expanduser(source))
        if not os.path.exists(here):
            raise _CannotRun(
                "--mount %s: no such file or directory" % source, "mkdir -p %s on that host" % source
            )
        places[target or here] = (here, target or here, is_readonly)
    if backing and not any((home + "/").startswith(target.rstrip("/") + "/") for target in places):
        # A home of its own, in which programs can write their caches; it ends with the job.
        os.mkdir(backing, 0o700)
        for source, target, _ in list(places.values()):
            if target.startswith(home + "/"):
                _make_target(os.path.join(backing, os.path.relpath(target, home)), source)
        places[home] = (backing, home, False)
    # Outer directories first: not every runtime sorts them.
    return [places[target] for target in sorted(places)]


def _make_target(path: str, source: str) -> None:
    # The runtime would make it as root, with directories above it where this user can't write.
    os.makedirs(path if os.path.isdir(source) else os.path.dirname(path), exist_ok=True)
    if not os.path.isdir(source):
        with open(path, "w"):
            pass


def _is_rootless(runtime: str) -> bool:
    """True if the runtime has no more rights than this user."""
    if runtime != "docker":
        return os.getuid() != 0
    code, output = _ask(["docker", "info", "--format", "{{.SecurityOptions}}"])
    return code == 0 and "rootless" in output


def _identity(runtime: str, *, is_rootless: bool) -> List[str]:
    """Return the words that make the container's processes this user's on the host."""
    if runtime in _WITHOUT_DAEMON:
        return []
    uid, gid = os.getuid(), os.getgid()
    if is_rootless and runtime == "podman":
        return ["--userns", "keep-id", "--user", "%d:%d" % (uid, gid), "--group-add", "keep-groups"]
    if is_rootless:
        return ["--user", "0:0"]  # which is this user outside
    groups = [str(group) for group in os.getgroups() if group != gid]
    return ["--user", "%d:%d" % (uid, gid), *(word for group in groups for word in ("--group-add", group))]


def _devices(runtime: str, exists: Callable[[str], bool] = os.path.exists) -> List[str]:
    """Return the words for this host's GPUs and InfiniBand adapters."""
    has_nvidia, has_amd = exists("/dev/nvidiactl"), exists("/dev/kfd")
    if runtime in _WITHOUT_DAEMON:
        return ["--nv"] * has_nvidia + ["--rocm"] * has_amd
    words = []
    if has_nvidia:
        words += ["--gpus", "all"] if runtime == "docker" else ["--device", "nvidia.com/gpu=all"]
    paths = (["/dev/kfd", "/dev/dri"] if has_amd else []) + ["/dev/infiniband"]
    return words + [word for path in paths if exists(path) for word in ("--device", path)]


def _limits(runtime: str, *, is_rootless: bool, is_bound: bool) -> List[str]:
    if runtime in _WITHOUT_DAEMON:
        return []
    words = ["--pids-limit", "-1"] if runtime == "podman" else []
    # Docker's daemon is root. If the runtime has no more rights than this process, the limit may be fixed.
    if (os.getuid() != 0 and not is_rootless) or _may_lock_memory():
        words += ["--ulimit", "memlock=-1:-1"]
    # Without it, the runtimes' filter of system calls refuses memory policies.
    return words + (["--cap-add", "SYS_NICE"] if is_bound else [])


def _may_lock_memory() -> bool:
    """True if this process may raise its limit of locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        return hard == resource.RLIM_INFINITY
    return True


def container_command(
    runtime: str,
    image: str,
    name: str,
    mounts: List[Mount],
    words: List[str],
    variables: Dict[str, str],
    script: List[str],
) -> List[str]:
    """Return the command for `script` in a new container, without secrets: these come on stdin."""
    if runtime in _WITHOUT_DAEMON:
        binds = ["%s:%s%s" % (source, target, ":ro" * is_readonly) for source, target, is_readonly in mounts]
        env = ["%s=%s" % (key, value) for key, value in variables.items() if key == "HVL_CONTAINER"]
        return [
            runtime,
            "exec",
            *words,
            *(word for bind in binds for word in ("--bind", bind)),
            *(word for pair in env for word in ("--env", pair)),
            image,
            *script,
        ]
    binds = [
        ",".join(
            [
                "type=bind",
                *(_field("%s=%s" % pair) for pair in (("source", source), ("target", target))),
                *(["readonly"] if is_readonly else []),
            ]
        )
        for source, target, is_readonly in mounts
    ]
    return [
        *(runtime, "run", "--rm", "-i", "--name", name, "--log-driver", "none"),
        *("--network", "host", "--ipc", "host", "--security-opt", "label=disable"),
        *words,
        *(word for key, value in variables.items() for word in ("-e", "%s=%s" % (key, value))),
        *(word for bind in binds for word in ("--mount", bind)),
        *("--entrypoint", script[0], image, *script[1:]),
    ]


def _field(text: str) -> str:
    """Quote a field of a line of comma-separated values, as the runtimes read --mount."""
    return '"%s"' % text.replace('"', '""') if "," in text or '"' in text else text
