"""What a kind of fault is: what is done, to which jobs and when, and what a job must come to."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faulty.scene import Scene

__all__ = ["ANY", "FORMS", "Form", "Kind", "Must", "failed", "goes_on", "lost"]

LEASE = 6.0
GRACE = 2.0
START = 30.0
CLOSING = 25.0
STOPPING = 30.0  # docs/internals/waits.md has both
SETTLE = 2.0

SOON = GRACE + SETTLE
"""Seconds in which a job ends when a worker has failed, or when it is asked to."""
LOST = LEASE + GRACE + SETTLE
"""... when a host is silent."""
LATE = START + GRACE
"""... when a host can't be reached before the workers have started."""
UNKILLABLE = GRACE + STOPPING + CLOSING
"""... when processes can't be killed."""
RECOVERY = LEASE + START + 10.0 + 4.0
"""... when an elastic job must first go on: a host is given up, another round starts, and the last workers have --exit-grace."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to start the job: its name, whether it is elastic, and the options that make it."""

    name: str
    elastic: bool = False
    options: tuple[str, ...] = ()
    asks: bool = False
    """Whether its workers train in the process: they ask for their places."""
    meets: bool = False
    """Whether its workers use the rendezvous."""
    jump: bool = False
    """Whether the hosts are behind a jump host."""


OWN = Form("static")
RELAY = Form("relay", options=("--rendezvous-relay", "always"), meets=True)
JUMP = Form("jump host", jump=True)
OPENSSH = Form("openssh", options=("--ssh-client", "openssh"))
MPI = Form("--mpi", options=("--mpi", "--mpirun", "mpirun.openmpi"))
RESTARTS = Form("by restarts", elastic=True)
PROCESS = Form("in the process", elastic=True, asks=True)
FORMS = {form.name: form for form in (OWN, RELAY, JUMP, OPENSSH, MPI, RESTARTS, PROCESS)}


@dataclass(frozen=True, slots=True)
class Must:
    """What a job must come to: one of these exit codes, within so many seconds, and where the code is not 0 these words.

    `words` is a regular expression for what hvlaunch itself says; {host} in it is the host of the fault. `always` is
    whether it must have said so with code 0 too, when the fault came while the job ran.
    """

    codes: tuple[int, ...]
    words: str = ""
    within: float = SOON
    always: bool = False


WELL = Must((0,))
ANY = ("connecting", "starting", "running", "ending")
"""Each moment."""


def goes_on(words: str = "", *codes: int, within: float = RECOVERY) -> Must:
    """An elastic job does, having said why, or ends with one of these codes."""
    return Must((0, *codes), words, within, always=bool(words) and not codes)


def failed(code: int, words: str) -> Must:
    """A worker on the host of the fault is named."""
    return Must((code,), rf"on host {{host}} failed first.*{words}")


def lost(words: str, within: float = LOST) -> Must:
    """The host of the fault is."""
    return Must((69,), rf"host {{host}}: .*({words})", within)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. `static`, `elastic` and `mpi` are what jobs of these forms must come to; None: it is not for them.

    `moments` are when it is done. `loses` says whose lines may be lost: "nobody", those of the "host", or of "all".
    `options` are more options of hvlaunch, `prefix` what it is started by.
    """

    name: str
    play: Callable[[Scene], None]
    static: Must | None = None
    elastic: Must | None = None
    mpi: Must | None = None
    moments: tuple[str, ...] = ("running",)
    loses: str = "nobody"
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    only: tuple[Form, ...] = ()
    """These forms only."""
    clean: float = SOON
    """Seconds after the end of the job in which its hosts must be empty."""
    leaves: str = ""
    """What may stay on the host, as a regular expression: where agent and guardian are killed at once, nobody is there to end it."""
    ends: bool = False
    """Whether the fault ends the job, elastic or not: it is not told that its work is done."""

    def must(self, form: Form) -> Must | None:
        if self.only and form not in self.only:
            return None
        return self.mpi if form is MPI else self.elastic if form.elastic else self.static

    @property
    def forms(self) -> list[Form]:
        return [form for form in FORMS.values() if self.must(form) is not None]
