"""The options of srun."""

from hvlaunch.cli.foreign.foreign_option import absent, needless, other, same, word

__all__ = ["SRUN"]

_PASSED = "--srun --mpi-args='{option}', in a job of Slurm"
_BOUND = "--srun --binding-args='{option}', in a job of Slurm"
_FOR_THE_JOB = "give it to salloc or sbatch: inside their job hvlaunch takes its hosts"

SRUN = (
    *same("-v, --verbose", "-V, --version", "-h, --help"),
    *same("-n N"),
    *word("-np {}", "--ntasks N"),
    *word("--nnodes {}, or a job of salloc or sbatch with so many", "-N, --nodes N"),
    *word("--slots-per-host {}", "--ntasks-per-node N"),
    *word("-H {}", "-w, --nodelist HOSTS"),
    *word("--hostfile {}", "-F, --nodefile FILE"),
    *word("--cwd {}", "-D, --chdir DIR"),
    *word("-x NAME=VALUE for each, or --env all", "--export NAMES"),
    *word("--env all", "-E, --preserve-env"),
    *word("--output-filename DIR", "-o, --output, -e, --error PATTERN"),
    *word("--stdin 0, all or none", "--input MODE"),
    *word("--quiet", "-Q"),
    *same("--quiet"),
    *word("--dry-run", "--test-only"),
    *word("--help", "--usage"),
    *word("timeout {} hvlaunch ...", "-t, --time TIME"),
    *word("--grace {}, or --exit-grace in an elastic job", "-W, --wait SECONDS"),
    *word("--start-timeout {}", "--msg-timeout SECONDS"),
    *word(
        "--env-file FILE, or the command itself: sh -c '...'",
        "--prolog, --epilog, --task-prolog, --task-epilog PROGRAM",
    ),
    *other("the hosts: -H a,b", "-H"),
    *word("-H with the hosts", "--hold"),
    *other(
        "a part of the files of options; for Slurm: --srun --mpi-args='--profile=VALUE'", "--profile VALUE"
    ),
    *other("the port of sshd; a partition is for salloc or sbatch", "-p PARTITION"),
    *other("a private key; --stdin 0, all or none is for the input", "-i MODE"),
    *other("a variable for the workers; hosts to leave out are --exclude HOSTS", "-x HOSTS"),
    *same("--exclude HOSTS"),
    *other("mpirun starts the workers; for Slurm's own: --srun --mpi-args='--mpi={}'", "--mpi TYPE"),
    *needless("each line has its rank before it, and --prefix says how", "-l, --label"),
    *needless("output comes line by line, at once", "-u, --unbuffered"),
    *needless("the first failing worker ends the job", "-K, --kill-on-bad-exit"),
    *needless("hosts may have more workers than processors: give slots, -H a:16", "-O, --overcommit"),
    *needless("Ctrl-C stops the job, and a second one kills it", "--quit-on-interrupt, -X, --disable-status"),
    *needless("hvlaunch takes part in the job around it", "--jobid ID"),
    *needless("hvlaunch sends its agent itself", "--send-libs"),
    *needless("each job's files are in a folder of their own", "--open-mode MODE"),
    *needless("hvlaunch chooses free ports; --worker-port-range says which", "--resv-ports"),
    *needless("connections to hosts are made at the same time", "-T, --threads N"),
    *absent("workers have no terminal", "--pty"),
    *absent("X is not forwarded", "--x11"),
    *absent("one command is started; a script can look at its RANK", "--multi-prog"),
    *absent("files are not copied to hosts; use a shared directory, or rsync", "--bcast, --compress"),
    *absent("files are not copied to hosts; use a shared directory, or rsync", "--bcast-exclude PATHS"),
    *absent("a lost host ends the job, unless it is elastic (--min-np)", "-k, --no-kill"),
    *absent(
        "the command is started as it is: name the container's program in it",
        "--container, --container-id PATH",
    ),
    *other("a Python module; the order of ranks is --map-by node or slot", "-m ORDER"),
    *word("--map-by node for cyclic, --map-by slot for block", "--distribution ORDER"),
    *word(_BOUND, "--cpu-bind, --gpu-bind, --mem-bind, --accel-bind, --hint, --tres-bind VALUE"),
    *word(_BOUND, "-c, --cpus-per-task, --cpus-per-gpu, --threads-per-core, --ntasks-per-core VALUE"),
    *word(_BOUND, "-B, --extra-node-info, --ntasks-per-socket, --ntasks-per-gpu, --gpus-per-task VALUE"),
    *word(_PASSED, "--exact, --overlap, --propagate"),
    *word(_PASSED, "-r, --relative, --het-group, --pack-group, --network, --slurmd-debug VALUE"),
    *word(_PASSED, "--acctg-freq, --cpu-freq, --gpu-freq, --tres-per-task, --stepmgr VALUE"),
    *same("--job-name NAME"),
    *word("--job-name NAME", "-J NAME"),
    *absent(_FOR_THE_JOB, "-A, --account, -q, --qos, --partition, --reservation NAME"),
    *absent(
        _FOR_THE_JOB, "-C, --constraint, --cluster-constraint, -M, --clusters, -L, --licenses, --prefer LIST"
    ),
    *absent(_FOR_THE_JOB, "-G, --gpus, --gpus-per-node, --gpus-per-socket, --gres, --gres-flags VALUE"),
    *absent(
        _FOR_THE_JOB,
        "--mem, --mem-per-cpu, --mem-per-gpu, --tmp, --mincpus, --thread-spec, -S, --core-spec VALUE",
    ),
    *absent(_FOR_THE_JOB, "--sockets-per-node, --cores-per-socket, --switches, --priority, --power VALUE"),
    *absent(_FOR_THE_JOB, "-b, --begin, --deadline, --time-min, -d, --dependency, --delay-boot VALUE"),
    *absent(
        _FOR_THE_JOB, "--mail-type, --mail-user, --comment, --wckey, --mcs-label, --uid, --gid, --extra VALUE"
    ),
    *absent(_FOR_THE_JOB, "--bb, --bbf, --signal VALUE"),
    *absent(
        _FOR_THE_JOB, "--contiguous, --spread-job, --use-min-nodes, --reboot, -Z, --no-allocate, --exclusive"
    ),
    *absent(_FOR_THE_JOB, "--nice, -I, --immediate"),
    *needless("hosts may have more workers than processors: give slots, -H a:16", "-s, --oversubscribe"),
)
