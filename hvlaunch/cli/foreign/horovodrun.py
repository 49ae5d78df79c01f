"""The options of horovodrun, which hvlaunch's own options are modelled on."""

from hvlaunch.cli.foreign.foreign_option import needless, other, same, word

__all__ = ["HOROVODRUN"]

_TUNING = {
    "--fusion-threshold-mb MB": "FUSION_THRESHOLD=$(({} * 1048576))",
    "--cycle-time-ms MS": "CYCLE_TIME={}",
    "--cache-capacity N": "CACHE_CAPACITY={}",
    "--hierarchical-allreduce": "HIERARCHICAL_ALLREDUCE=1",
    "--no-hierarchical-allreduce": "HIERARCHICAL_ALLREDUCE=0",
    "--hierarchical-allgather": "HIERARCHICAL_ALLGATHER=1",
    "--no-hierarchical-allgather": "HIERARCHICAL_ALLGATHER=0",
    "--torus-allreduce": "TORUS_ALLREDUCE=1",
    "--no-torus-allreduce": "TORUS_ALLREDUCE=0",
    "--autotune": "AUTOTUNE=1",
    "--no-autotune": "AUTOTUNE=0",
    "--autotune-log-file FILE": "AUTOTUNE_LOG={}",
    "--autotune-warmup-samples N": "AUTOTUNE_WARMUP_SAMPLES={}",
    "--autotune-steps-per-sample N": "AUTOTUNE_STEPS_PER_SAMPLE={}",
    "--autotune-bayes-opt-max-samples N": "AUTOTUNE_BAYES_OPT_MAX_SAMPLES={}",
    "--autotune-gaussian-process-noise NOISE": "AUTOTUNE_GAUSSIAN_PROCESS_NOISE={}",
    "--timeline-filename FILE": "TIMELINE={}",
    "--timeline-mark-cycles": "TIMELINE_MARK_CYCLES=1",
    "--no-timeline-mark-cycles": "TIMELINE_MARK_CYCLES=0",
    "--stall-check": "STALL_CHECK_DISABLE=0",
    "--no-stall-check": "STALL_CHECK_DISABLE=1",
    "--stall-check-warning-time-seconds SECONDS": "STALL_CHECK_TIME_SECONDS={}",
    "--stall-check-shutdown-time-seconds SECONDS": "STALL_SHUTDOWN_TIME_SECONDS={}",
    "--mpi-threads-disable": "MPI_THREADS_DISABLE=1",
    "--no-mpi-threads-disable": "MPI_THREADS_DISABLE=0",
    "--num-nccl-streams N": "NUM_NCCL_STREAMS={}",
    "--thread-affinity N": "THREAD_AFFINITY={}",
    "--gloo-timeout-seconds SECONDS": "GLOO_TIMEOUT_SECONDS={}",
    "--log-level LEVEL": "LOG_LEVEL={}",
    "--log-with-timestamp": "LOG_HIDE_TIME=0",
    "--no-log-hide-timestamp": "LOG_HIDE_TIME=0",
    "--log-without-timestamp": "LOG_HIDE_TIME=1",
    "--log-hide-timestamp": "LOG_HIDE_TIME=1",
}
"""What sets a variable of Horovod's library, and does nothing else."""

HOROVODRUN = (
    *same(
        "-np, --num-proc N",
        "-H, --hosts HOSTS",
        "-hostfile, --hostfile FILE",
        "--host-discovery-script SCRIPT",
        "--slots-per-host N",
        "--min-np, --min-num-proc N",
        "--max-np, --max-num-proc N",
        "--elastic-timeout SECONDS",
        "--reset-limit N",
        "--blacklist-cooldown-range MIN MAX",
        "--network-interfaces, --network-interface NAMES",
        "--start-timeout SECONDS",
        "--output-filename DIR",
        "-prefix-timestamp, --prefix-output-with-timestamp",
        "-p, --ssh-port PORT",
        "-i, --ssh-identity-file FILE",
        "--gloo",
        "--mpi",
        "--jsrun",
        "--mpi-args OPTIONS",
        "--binding-args OPTIONS",
        "--verbose",
        "-cb, --check-build",
        "--version",
        "-h, --help",
    ),
    *other("-V; -v is --verbose", "-v"),
    *(row for spelled, variable in _TUNING.items() for row in word(f"-x HOROVOD_{variable}", spelled)),
    *word("-x NCCL_IB_DISABLE=1", "--tcp"),
    *word(
        "-x HOROVOD_NAME=VALUE for each of its parameters, or --env-file FILE for all", "--config-file FILE"
    ),
    *needless("hvlaunch keeps no cache", "--disable-cache"),
)
