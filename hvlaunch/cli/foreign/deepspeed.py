"""The options of deepspeed, DeepSpeed's launcher."""

from hvlaunch.cli.foreign.foreign_option import absent, needless, other, same, word

__all__ = ["DEEPSPEED"]

DEEPSPEED = (
    *same(
        "-h, --help",
        "--hostfile FILE",
        "--quiet",
        "--include SPEC",
        "--exclude SPEC",
        "--module",
        "--no_python",
    ),
    *word("--quiet", "-q"),
    *word("--ssh-port {}", "--ssh_port PORT"),
    *other("the hosts: -H a:4,b:4; the file is --hostfile FILE", "-H FILE"),
    *other("a private key; the hosts to use are --include SPEC", "-i SPEC"),
    *word("--exclude {}", "-e SPEC"),
    *word("--nnodes {}", "--num_nodes N"),
    *word("--slots-per-host {}, or -np on this machine alone", "--num_gpus, --num_accelerators N"),
    *word("--nnodes N:M with --nproc-per-node", "--min_elastic_nodes, --max_elastic_nodes N"),
    *word("--min-np N, with which a job is elastic", "--elastic_training"),
    *needless("hvlaunch finds the address and a free port", "--master_addr ADDRESS", "--master_port PORT"),
    *needless("hvlaunch numbers the hosts", "--node_rank N"),
    *word("--mpi, --srun or --gloo", "--launcher NAME"),
    *word("--mpi --mpi-args='{}'", "--launcher_args OPTIONS"),
    *needless("no argument is added to the command: LOCAL_RANK is set", "--no_local_rank"),
    *needless("no ssh is used to this machine", "--no_ssh"),
    *needless("hvlaunch connects once, and reports all hosts that it can't reach", "--no_ssh_check"),
    *needless("a host that is not this machine is reached by ssh", "--force_multi"),
    *needless("the shell has the process id: $!", "--save_pid"),
    *word("--output-filename {}", "--enable_each_rank_log DIR"),
    *word("--verbose or --quiet", "--log_level LEVEL"),
    *absent("the autotuner is DeepSpeed's own", "--autotuning MODE"),
    *word("--srun --mpi-args='{option}', in a job of Slurm", "--comment, --account TEXT"),
    *word("numactl --cpunodebind=0 python ... as the command", "--bind_cores_to_rank"),
    *word("taskset -c {} python ... as the command", "--bind_core_list CORES"),
    *word("sh -c '. {}; exec python train.py' as the command", "--venv_script FILE"),
)
