"""Options known from other launchers: torchrun, DeepSpeed and Open MPI; horovodrun's, for Horovod's workers; and those for programs other than torch's."""

from collections.abc import Callable
from typing import Any

from hvlaunch.cli.options import Option, OptionGroup, Value, values

__all__ = ["BINDING", "CONTROLLER", "FAMILIAR", "HOROVOD", "LEASES", "PROGRAMS"]

PROGRAMS = OptionGroup(
    "programs",
    pages=(("Any program by one command", "../guides/programs.md"),),
    options=(
        Option(
            "preset",
            ("--for",),
            "start a program as it needs: vllm, ray, jax and others",
            Value(("NAME",), values.not_empty),
            more="`hvlaunch presets` lists [the names](../guides/programs.md#presets). `--dry-run` shows the result.",
            example="hvlaunch --for jax -H a:4,b:4 python train.py",
            source="own",
        ),
        Option(
            "templates",
            ("--templates",),
            "fill in words such as `{rank}` of the command",
            more="[Places](../guides/programs.md#places-in-the-command) are numbers, names, addresses and free ports. "
            "`{{rank}}` gives `{rank}`.",
            example="hvlaunch --templates -np 2 python train.py",
        ),
        Option(
            "role",
            ("--role",),
            "a command with workers of its own",
            Value(("NAME=N[xGPUS][@HOSTS]: COMMAND",), values.not_empty),
            more="For jobs of [several programs](../guides/roles.md), such as trainers and generators: each role has a world, "
            "`RANK` and `MASTER_PORT` of its own.",
            example="hvlaunch --role 'train=2@a,b: python train.py' --role 'gen=3@c: python serve.py'",
            repeats="list",
        ),
        Option(
            "role_policy",
            ("--role-policy",),
            "response to a failed worker of a role",
            Value(("NAME=POLICY",), values.not_empty),
            default="`end`",
            more="`end`: the job ends; `restart`: the worker starts again; `restart-all`: all workers of its role do. "
            "`--max-restarts` counts for each.",
            repeats="list",
        ),
        Option(
            "role_for",
            ("--role-for",),
            "preset for a role, as `--for` for a job",
            Value(("NAME=PRESET",), values.not_empty),
            repeats="list",
            source="own",
        ),
        Option(
            "role_env",
            ("--role-env",),
            "environment variable for the workers of a role",
            Value(("NAME:VARIABLE=VALUE",), values.not_empty, is_assignment=True),
            more="The value may have places, as the command.",
            repeats="list",
        ),
        Option(
            "end_with_role",
            ("--end-with-role",),
            "role that ends the job when its workers have ended with 0",
            Value(("NAME",), values.not_empty),
            default="the job ends when all roles have",
            more="Workers of other roles, which may be services, are stopped then, and the exit code is 0.",
        ),
        Option(
            "ready_port",
            ("--ready-port",),
            "port of a service on rank 0's host",
            values.PORT,
            field="ready_port",
            excludes="ready",
            more="`hvlaunch wait --ready` waits until the port takes a connection.",
            example="hvlaunch --detach --ready-port 8000 -np 1 python train.py",
        ),
        Option(
            "ready_url",
            ("--ready-url",),
            "URL of a service, as on rank 0's host",
            Value(("URL",), values.http_url),
            field="ready_url",
            excludes="ready",
            more="`hvlaunch wait --ready` waits until the URL answers without an error.",
            example="hvlaunch --detach --ready-url http://localhost:8000/health -np 1 python train.py",
        ),
        Option(
            # An alternative to --nproc-per-node 1, which with_slots() applies.
            "nproc_per_node",
            ("--per-host",),
            "a worker on each host, with every GPU of the host",
            constant=1,
            excludes="workers of a host",
            more="For vLLM, Ray, torchrun and other programs with a process for each GPU.",
            example="hvlaunch --per-host -H a,b python train.py",
        ),
    ),
)

FAMILIAR = OptionGroup(
    "known from other launchers",
    pages=(("Coming from another launcher", "coming-from.md"),),
    options=(
        Option(
            "nnodes",
            ("--nnodes",),
            "number of hosts to use, or the fewest and the most",
            Value(("N[:M]",), values.hosts_or_bounds),
            default="all hosts",
            more="The first `N` of the hosts are used. With `N:M` the job is elastic, and needs `--nproc-per-node`: it continues with `N` "
            "hosts, and takes up to `M`. With `--skip-bad-hosts`, and where an elastic job has `--nproc-per-node`, other hosts take the place of bad ones.",
            example="hvlaunch --nnodes 2 --nproc-per-node 4 -H a,b,c python train.py",
        ),
        Option(
            "nproc_per_node",
            ("--nproc-per-node",),
            "number of workers on each host, or gpu, auto or cpu",
            Value(("N",), values.workers_per_host),
            excludes="workers of a host",
            default="`-np`, else one in every slot",
            more="Each host gets this many workers, even if it has more slots. `gpu` and `auto` are one for each GPU of a host; one without GPUs has "
            "one worker. Where all hosts are this machine, and it has no nvidia-smi, `auto` is one for each processor, and `gpu` is an error. "
            "`cpu` is for this machine alone.",
            example="hvlaunch --nproc-per-node 4 -H a:8,b:8 python train.py",
            # torchrun takes both spellings.
            aliases=("--nproc_per_node",),
        ),
        Option(
            "module",
            ("-m", "--module"),
            "take the command for a Python module",
            more="`hvlaunch -m train.main --lr 3` starts `python -m train.main --lr 3`. `--no-python` starts the command as it is, "
            "as hvlaunch does without any of these.",
            # torchrun's users type --no-python, and not --no-module.
            more_opposites=("--no-python", "--no_python"),
        ),
        Option(
            "tee",
            ("--tee",),
            "streams to show and to keep in files",
            Value(("STREAMS",), values.streams),
            more="1 is stdout, 2 is stderr, 3 is both. It needs `--output-filename` (or `--log-dir`), whose files have all output.",
            example="hvlaunch -np 2 --log-dir logs --redirects 3 --tee 2 python train.py",
        ),
        Option(
            "redirects",
            ("--redirects",),
            "streams to keep in files, and not to show",
            Value(("STREAMS",), values.streams),
            more="Values are as for `--tee`, which wins for a stream that both name.",
            example="hvlaunch -np 2 --log-dir logs --redirects 1 python train.py",
        ),
        Option(
            "include",
            ("--include",),
            "hosts to use, perhaps with the numbers of their GPUs",
            Value(("HOST[:N,...]@...",), values.not_empty),
            more="Workers of a host with numbers see only these GPUs, one each.",
            example="hvlaunch -H a:8,b:8,c:8 --include a@c:0,1 python train.py",
            # DeepSpeed refuses both in one line, too.
            excludes="selection",
        ),
        Option(
            "exclude",
            ("--exclude",),
            "hosts not to use, or GPUs of hosts by number",
            Value(("HOST[:N,...]@...",), values.not_empty),
            example="hvlaunch -H a:8,b:8,c:8 --exclude b@c:0 python train.py",
            excludes="selection",
        ),
        Option(
            "map_by",
            # Open MPI has both dashes.
            ("--map-by", "-map-by"),
            "how workers are dealt out to hosts: slot, node or ppr:N:node",
            Value(("POLICY",), values.mapping),
            default="slot",
            more="`slot`: they fill the slots of a host, then those of the next. `node`: they go to one host after the other. `ppr:N:node`: "
            "`N` on each host.",
            example="hvlaunch -np 4 -H a:4,b:4 --map-by node python train.py",
        ),
    ),
)


BINDING = OptionGroup(
    "processors and GPUs",
    pages=(("Processors and GPUs of a worker", "../guides/binding.md"),),
    options=(
        Option(
            "bind",
            ("--bind",),
            "processors for each worker: numa, socket, core, cache or gpu",
            Value(("WHAT",), choices=("none", "numa", "socket", "core", "cache", "gpu")),
            field="bind",
            more="`numa` and `socket` are those of the worker's GPU, or of an equal share by slot. `core` divides the cores of the NUMA node "
            "among its workers, `cache` gives each a last-level cache of the node. `gpu` binds to the processors nearest to the GPU, and leaves workers without one alone. Memory is preferred from the same node.",
            example="hvlaunch -np 8 -H a:4,b:4 --bind numa python train.py",
        ),
        Option(
            "gpus_per_worker",
            ("--gpus-per-worker",),
            "number of GPUs that each worker sees",
            Value(("N",), values.positive),
            field="gpus_per_worker",
            default="all GPUs of the host",
            more="Slot 0 gets the first `N`, slot 1 the next: of the host's, or of those in its `CUDA_VISIBLE_DEVICES`. `LOCAL_RANK` is then 0.",
            example="hvlaunch -np 8 -H a:4,b:4 --gpus-per-worker 2 python train.py",
        ),
    ),
)


LEASES = OptionGroup(
    "hosts that several users share",
    pages=(("Share GPUs", "../guides/shared-machines.md#share-gpus"),),
    options=(
        Option(
            "lease_gpus",
            ("--lease-gpus",),
            "start on free GPUs alone, and keep other jobs off them",
            more="The hosts of the job are those of `-H` with the most free GPUs, as few as possible. A GPU is free if no job of hvlaunch has "
            "leased it, no process runs on it, and its memory is not in use. Each worker takes one, or those of `--gpus-per-worker`. The leases end with the job.",
            example="hvlaunch --lease-gpus -np 16 -H 'gpu[1-8]' python train.py",
            excludes="leases",
        ),
        Option(
            "lease_slots",
            ("--lease-slots",),
            "the same for hosts without GPUs, of N slots each",
            Value(("N",), values.positive),
            field="leases.slots",
            default="GPUs, with `--lease-gpus`",
            more="All users of a host take the same `N`.",
            example="hvlaunch --lease-slots 64 -np 128 -H 'cpu[1-8]' python train.py",
            excludes="leases",
        ),
        Option(
            "wait",
            ("--wait",),
            "wait until enough GPUs or slots are free",
            field="leases.wait",
            more="Without it the job ends with exit code 75, and says who has them.",
            example="hvlaunch --lease-gpus --wait -np 16 -H 'gpu[1-8]' python train.py",
        ),
        Option(
            "fair_wait",
            ("--fair-wait",),
            "time after which the job that has waited longest comes first",
            values.SECONDS,
            field="leases.fair_wait",
            more="From then on no other job leases on its hosts. Until then any job takes what it needs.",
        ),
        Option(
            "max_idle",
            ("--max-idle",),
            "stop a job whose GPUs have all done nothing for so long",
            Value(("TIME",), values.span),
            field="leases.max_idle",
            default="no limit",
            more="After half of the time there is a warning. The job ends with exit code 143, as with `hvlaunch stop`. `hvlaunch hosts` names "
            "leases that have been idle for longer.",
            example="hvlaunch --lease-gpus --max-idle 2h -np 16 -H 'gpu[1-8]' python train.py",
        ),
        Option(
            "lease_directory",
            ("--lease-directory",),
            "directory of the locks on each host",
            Value(("DIR",), values.not_empty, path="hosts"),
            field="leases.directory",
            more="All users of a host take the same.",
        ),
    ),
)


_SAMPLES = Value(("N",), values.count)
_WAIT = Value(("SECONDS",), values.count, unit="s")
# Files on hosts can't be checked or resolved here.
_ON_HOSTS = Value(("FILE",), values.not_empty)


def _number(
    flag: str,
    variable: str,
    text: str,
    value: Value,
    default: str,
    *,
    convert: Callable[[Any], str] = str,
    more: str = "",
) -> Option:
    return Option(
        flag[2:].replace("-", "_"),
        (flag,),
        text,
        value,
        variable=f"HOROVOD_{variable}",
        default=default,
        convert=convert,
        more=more,
    )


def _switch(flag: str, variable: str, text: str, *, more: str = "") -> Option:
    return Option(
        flag[2:].replace("-", "_"),
        (flag,),
        text,
        variable=f"HOROVOD_{variable}",
        more=more,
        convert=values.one_or_zero,
    )


# An option that is not given sets no variable, and Horovod's own default holds.
HOROVOD = OptionGroup(
    "Horovod",
    about="For workers that use Horovod. Each of these sets a variable for its library, and implies `--horovod` in a static job. "
    "A switch sets 1 and its opposite 0; without either the variable stays as it is.",
    pages=(("Horovod's workers", "horovod.md"), ("coming from horovodrun", "coming-from.md#horovodrun")),
    options=(
        Option(
            "horovod",
            ("--horovod",),
            "the command uses Horovod (`hvd.init`)",
            field="horovod",
            more="Its workers have no token: hvlaunch's rendezvous server answers them too, if they are on the job's hosts. "
            "`HOROVOD_*` is passed on.",
            example="hvlaunch --horovod -np 8 -H gpu01:4,gpu02:4 python train.py",
        ),
        _number(
            "--fusion-threshold-mb",
            "FUSION_THRESHOLD",
            "most that tensors sent at once may have, in MB",
            Value(("MB",), values.count),
            "128",
            convert=values.bytes_of_mb,
        ),
        _number(
            "--cycle-time-ms",
            "CYCLE_TIME",
            "time between two looks for tensors, in ms",
            Value(("MS",), values.from_0),
            "1",
            convert="{:g}".format,
        ),
        _number(
            "--cache-capacity", "CACHE_CAPACITY", "most tensors whose names are cached", _SAMPLES, "1024"
        ),
        _switch(
            "--hierarchical-allreduce", "HIERARCHICAL_ALLREDUCE", "allreduce within hosts, then between them"
        ),
        _switch(
            "--hierarchical-allgather", "HIERARCHICAL_ALLGATHER", "allgather within hosts, then between them"
        ),
        _switch("--torus-allreduce", "TORUS_ALLREDUCE", "allreduce in two rings at once"),
        _switch("--autotune", "AUTOTUNE", "find the best of these while training"),
        _number("--autotune-log-file", "AUTOTUNE_LOG", "file for what autotune finds", _ON_HOSTS, "none"),
        _number(
            "--autotune-warmup-samples",
            "AUTOTUNE_WARMUP_SAMPLES",
            "samples that autotune skips",
            _SAMPLES,
            "3",
        ),
        _number(
            "--autotune-steps-per-sample", "AUTOTUNE_STEPS_PER_SAMPLE", "steps of one sample", _SAMPLES, "10"
        ),
        _number(
            "--autotune-bayes-opt-max-samples",
            "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "most samples that autotune takes",
            _SAMPLES,
            "20",
        ),
        _number(
            "--autotune-gaussian-process-noise",
            "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "noise of a sample that autotune expects",
            Value(("NOISE",), values.from_0_to_1),
            "0.8",
            convert="{:g}".format,
        ),
        _number(
            "--timeline-filename",
            "TIMELINE",
            "file for a timeline of all that Horovod does",
            _ON_HOSTS,
            "none",
            more="Rank 0 writes it, on its host.",
        ),
        _switch("--timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "mark cycles in the timeline"),
        Option(
            "stall_check",
            ("--stall-check",),
            "look for ranks that wait for others",
            variable="HOROVOD_STALL_CHECK_DISABLE",
            convert=values.zero_or_one,
        ),
        _number(
            "--stall-check-warning-time-seconds",
            "STALL_CHECK_TIME_SECONDS",
            "wait after which Horovod warns",
            _WAIT,
            "60",
        ),
        _number(
            "--stall-check-shutdown-time-seconds",
            "STALL_SHUTDOWN_TIME_SECONDS",
            "wait after which Horovod ends the worker",
            _WAIT,
            "0, which is never",
        ),
        _switch("--mpi-threads-disable", "MPI_THREADS_DISABLE", "use one thread with MPI"),
        _number("--num-nccl-streams", "NUM_NCCL_STREAMS", "NCCL streams", _SAMPLES, "1"),
        _number(
            "--thread-affinity", "THREAD_AFFINITY", "processor of Horovod's thread", _SAMPLES, "any processor"
        )._replace(aliases=("--ccl-bgt-affinity", "--mlsl-bgt-affinity")),
        _number(
            "--gloo-timeout-seconds",
            "GLOO_TIMEOUT_SECONDS",
            "time that workers wait for each other",
            _WAIT,
            "30",
        ),
        _number(
            "--log-level",
            "LOG_LEVEL",
            "what Horovod's library logs",
            Value(choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")),
            "WARNING",
        ),
        Option(
            "log_with_timestamp",
            ("--log-with-timestamp",),
            "time in each line of Horovod's log",
            variable="HOROVOD_LOG_HIDE_TIME",
            convert=values.zero_or_one,
            aliases=("--no-log-hide-timestamp",),
            more_opposites=("--log-without-timestamp", "--log-hide-timestamp"),
        ),
        Option(
            "tcp",
            ("--tcp",),
            "let NCCL use TCP, and no InfiniBand",
            variable="NCCL_IB_DISABLE",
            convert=values.one_or_zero,
        ),
        Option(
            "disable_cache",
            ("--disable-cache",),
            "nothing, for horovodrun's sake: there is no cache",
        ),
    ),
)

CONTROLLER = OptionGroup(
    "controller",
    about="The program that starts the workers.",
    pages=(("mpirun, srun and jsrun", "mpi.md"),),
    options=(
        Option(
            "launcher",
            ("--gloo",),
            "start the workers with hvlaunch (default)",
            # None is hvlaunch's own controller; --gloo takes back a file's launcher.
            constant=None,
            excludes="launcher",
        ),
        Option(
            "launcher",
            ("--mpi",),
            "start the workers with mpirun",
            more="The mpirun may be that of Open MPI, MPICH, Intel MPI, MVAPICH or IBM Spectrum MPI.",
            example="hvlaunch --mpi -np 8 -H a:4,b:4 python train.py",
            constant="mpirun",
            excludes="launcher",
        ),
        Option(
            "launcher",
            ("--srun",),
            "start the workers with srun, in a job of Slurm",
            example="hvlaunch --srun python train.py",
            constant="srun",
            excludes="launcher",
        ),
        Option(
            "launcher",
            ("--jsrun",),
            "start the workers with jsrun, in a job of LSF",
            constant="jsrun",
            excludes="launcher",
        ),
        Option(
            "mpirun",
            ("--mpirun",),
            "the mpirun that `--mpi` calls",
            Value(("PATH",), values.not_empty),
            field="mpi.program",
            default="the one on `PATH`",
            source="own",
        ),
        Option(
            "mpi_args",
            ("--mpi-args",),
            "more options for the launcher, in one word",
            values.WORDS,
            # Words for another program, which begin with dashes.
            field="mpi.args",
            example="hvlaunch --mpi --mpi-args='--report-bindings' -np 2 python train.py",
            repeats="list",
            convert=values.flat,
            source="own",
        ),
        Option(
            "binding_args",
            ("--binding-args",),
            "the launcher's options for binding",
            values.WORDS,
            field="mpi.binding",
            more="They bind workers to processors, and are one word.",
            default="no worker is bound to processors",
            example="hvlaunch --mpi --binding-args='--bind-to core' -np 2 python train.py",
            repeats="list",
            convert=values.flat,
            source="own",
        ),
    ),
)
