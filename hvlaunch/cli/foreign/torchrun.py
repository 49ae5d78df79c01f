"""The options of torchrun, without those that it has by underscores too."""

from hvlaunch.cli.foreign.foreign_option import absent, needless, same, word

__all__ = ["TORCHRUN"]

TORCHRUN = (
    *same(
        "-h, --help",
        "--nnodes N[:M]",
        "--nproc-per-node N",
        "-m, --module",
        "--no-python",
        "--log-dir DIR",
        "--redirects STREAMS",
        "--tee STREAMS",
    ),
    *needless(
        "hvlaunch's own rendezvous is always there",
        "--rdzv-backend NAME",
        "--rdzv-endpoint HOST:PORT",
        "--rdzv-id ID",
        "--rdzv-conf CONF",
        "--standalone",
    ),
    *needless(
        "hvlaunch numbers the hosts, and finds the address and a free port",
        "--node-rank N",
        "--master-addr ADDRESS",
        "--master-port PORT",
    ),
    *word("--network-interfaces NAME, or address= in a hostfile", "--local-addr ADDRESS"),
    *same("--max-restarts N"),
    *needless("hvlaunch hears at once how a worker ends", "--monitor-interval SECONDS"),
    *needless("each worker is a process of its own", "--start-method METHOD"),
    *word("--events FILE", "--event-log-handler NAME"),
    *absent("workers have no roles; a script can read its RANK", "--role NAME"),
    *word("python FILE, behind the options", "--run-path"),
    *word("--redirects {}", "-r STREAMS"),
    *word("--tee {}", "-t STREAMS"),
    *word("--ranks {}, which counts all ranks", "--local-ranks-filter RANKS"),
    *word(
        "--output-filename DIR, and grep in its files",
        "--duplicate-stdout-filters, --duplicate-stderr-filters TEXTS",
    ),
    *absent("the files of --output-filename have one form", "--logs-specs NAME"),
    *word("numactl --cpunodebind=0 python ... as the command", "--numa-binding POLICY"),
    *needless(
        "SIGINT, SIGTERM and SIGHUP end the job, SIGUSR1 and SIGUSR2 reach the workers",
        "--signals-to-handle NAMES",
    ),
    *word("--grace {}", "--shutdown-timeout SECONDS"),
    *absent(
        "a worker sees all GPUs of its host, and takes the one of its LOCAL_RANK", "--virtual-local-rank"
    ),
    *needless("LOCAL_RANK is always set", "--use-env"),
)
