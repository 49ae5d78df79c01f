"""The options of MPICH's mpiexec, which is Hydra; Intel MPI's and MVAPICH's are mostly the same."""

from hvlaunch.cli.foreign.foreign_option import absent, needless, other, same, word

__all__ = ["MPICH"]

_PASSED = "--mpi --mpi-args='{option}'"
_BOUND = "--mpi --binding-args='{option}'; without --mpi no worker is bound"

MPICH = (
    *same(
        "-n, -np N",
        "-hosts, -host HOSTS",
        "-machinefile FILE",
        "-wdir DIR",
        "-v",
        "-V",
        "-h",
    ),
    *word("--verbose", "-verbose"),
    *word("--version", "-version"),
    *word("--help", "-help"),
    *word("--hostfile {}", "-f FILE"),
    *word("--slots-per-host {}", "-ppn, -perhost N"),
    *word("--slots-per-host 1", "-rr"),
    *word("-x {=}", "-env, -genv NAME VALUE"),
    *word("-x NAME, for each", "-envlist, -genvlist NAMES"),
    *word("--env all", "-envall, -genvall"),
    *word("--network-interfaces {}", "-iface NAME"),
    *word("--check-build", "-info"),
    *word("--output-filename DIR", "-outfile-pattern, -errfile-pattern PATTERN"),
    *word("--prefix TEXT", "-prepend-pattern PATTERN"),
    *word("--srun, --jsrun, --mpi or --gloo", "-launcher, -bootstrap NAME"),
    *word("--ssh-client openssh, with another ssh first on PATH", "-launcher-exec, -bootstrap-exec PROGRAM"),
    *needless("few variables are passed on: PATH, PYTHONPATH, NCCL_* and some more", "-envnone, -genvnone"),
    *needless("each line has its rank before it, and --prefix says how", "-prepend-rank, -l"),
    *needless("a job of Slurm, LSF, PBS or Grid Engine is found", "-rmk NAME"),
    *needless("--events FILE has all exit codes", "-print-all-exitcodes"),
    *needless("X is not forwarded", "-disable-x"),
    *needless("hvlaunch knows its own host", "-localhost NAME"),
    *absent("X is not forwarded", "-enable-x"),
    *absent("one command is started; a script can look at its RANK", "-configfile FILE"),
    *absent("a failing worker ends the job; an elastic job (--min-np) goes on", "-disable-auto-cleanup"),
    *absent("hosts are used in the order that you name them", "-order-nodes ORDER"),
    *absent("a worker sees all GPUs of its host, and takes the one of its LOCAL_RANK", "-gpus-per-proc N"),
    *word("-H without this machine", "-skip-launch-node"),
    *other("--map-by slot, node or ppr:N:node; for mpirun's own: --mpi --binding-args", "-map-by VALUE"),
    *word(_BOUND, "-bind-to, -membind, -topolib VALUE"),
    *word(_PASSED, "-demux, -nameserver, -usize, -port, -ckpoint-prefix VALUE"),
    *word(_PASSED, "-profile, -disable-hostname-propagation, -pmi-port"),
)
