"""The options of hvlaunch, declared once: the command line, JobSpec, help, completion and docs/reference/options.md use this table."""

from pathlib import Path
from typing import get_args

from hvlaunch.cli.options import Option, OptionGroup, Value, values
from hvlaunch.cli.options.familiar import BINDING, CONTROLLER, FAMILIAR, HOROVOD, LEASES, PROGRAMS
from hvlaunch.cli.options.general import CONTAINERS, ENVIRONMENT, FILES, GENERAL
from hvlaunch.job import (
    ColorPolicy,
    HostKeyPolicy,
    NcclPolicy,
    OnHang,
    RankOrder,
    RelayPolicy,
    SSHClient,
    StdinPolicy,
)

__all__ = ["COMMAND", "ELASTIC", "GROUPS", "SSH"]

# source="own": the option decides what hvlaunch itself runs, writes or trusts, so a file that no user
# named, which may come with a repository, must not set it.
SSH = OptionGroup(
    "SSH",
    pages=(("SSH", "../guides/ssh.md"),),
    options=(
        Option(
            "ssh_port",
            ("-p", "--ssh-port"),
            "port of sshd on hosts for which none is given",
            values.PORT,
            field="ssh.port",
            default="that of the ssh configuration, else 22",
        ),
        Option(
            "ssh_identity_file",
            ("-i", "--ssh-identity-file"),
            "private key to log in with",
            values.FILE,
            field="ssh.identity",
            convert=values.readable,
            source="own",
        ),
        Option(
            "ssh_user",
            ("--ssh-user",),
            "user name on hosts for which none is given",
            Value(("NAME",), values.user),
            field="ssh.user",
            default="that of the ssh configuration, else yours",
            example="hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py",
            is_everyday=True,
        ),
        Option(
            "ssh_config",
            ("--ssh-config",),
            "configuration file of ssh",
            values.FILE,
            # ssh's configuration names programs to run (ProxyCommand).
            field="ssh.config",
            default="`~/.ssh/config` and the system's",
            convert=values.readable,
            source="own",
        ),
        Option(
            "host_keys",
            ("--host-keys",),
            "what to do where known_hosts has no key",
            Value(choices=get_args(HostKeyPolicy)),
            field="ssh.host_keys",
            more="`strict`: refuse the host; `accept-new`: add its key to known_hosts; `off`: check no key at all.",
            source="own",
        ),
        Option(
            "ssh_client",
            ("--ssh-client",),
            "program that speaks ssh",
            Value(choices=get_args(SSHClient)),
            field="ssh.client",
            more="`paramiko`: hvlaunch itself, with this library; `openssh`: the `ssh` binary, for GSSAPI, FIDO keys, PKCS#11, and "
            "connections that are open already (ControlPath).",
            source="own",
        ),
        Option(
            "forward_agent",
            ("--forward-agent",),
            "let programs on the hosts use your ssh agent",
            field="ssh.forward_agent",
            more="It needs `--ssh-client openssh`. Whoever controls a host can then log in as you, wherever your keys are accepted, while the job "
            "runs. `ForwardAgent` of the ssh configuration is not followed.",
            source="own",
        ),
        Option(
            "connect_limit",
            ("--connect-limit",),
            "most connections made to a host at a time",
            values.NUMBER,
            # Beyond its MaxStartups, sshd drops connections at random.
            field="ssh.connect_limit",
            more="The same holds for a jump host.",
        ),
        Option(
            "remote_python",
            ("--remote-python",),
            "Python >= 3.8 for hvlaunch on the hosts",
            Value(("PATH",), values.not_empty, completion="file"),
            field="remote_python",
            default="the path of the Python here, else python3, else python",
            source="own",
        ),
        Option(
            "start_timeout",
            ("--start-timeout",),
            "time to connect to all hosts",
            values.SECONDS,
            field="start_timeout",
        ),
    ),
)


ELASTIC = OptionGroup(
    "elastic jobs",
    about="Hosts may come and go, workers and hosts may fail, and training continues. A job is elastic with any of `--min-np`, "
    "`--max-np`, `--host-discovery-script`, `--max-restarts` and `--spares`.",
    pages=(("Elastic jobs", "../guides/lost-host.md"),),
    options=(
        Option(
            "min_np",
            ("--min-np", "--min-num-proc"),
            "least number of workers of an elastic job",
            values.NUMBER,
            field="elastic.min_np",
            default="`-np`, else 1",
            more="With fewer slots the job waits, for `--elastic-timeout`.",
            example="hvlaunch -np 4 --min-np 2 --max-np 8 --hostfile hosts python train.py",
            is_everyday=True,
        ),
        Option(
            "max_np",
            ("--max-np", "--max-num-proc"),
            "largest number of workers",
            values.NUMBER,
            field="elastic.max_np",
            default="one in every slot",
        ),
        Option(
            "host_discovery_script",
            ("--host-discovery-script",),
            "command that prints the current hosts",
            Value(("COMMAND",), values.not_empty),
            # Excludes -H and --hostfile: a job has one source of hosts.
            field="elastic.discovery_script",
            excludes="hosts",
            more="It prints them as lines of a hostfile, and is run every `--discovery-interval`.",
            example="hvlaunch --min-np 2 --host-discovery-script ./discover.sh python train.py",
            source="own",
        ),
        Option(
            "max_restarts",
            ("--max-restarts", "--reset-limit"),
            "number of failures that do not end the job",
            values.COUNT,
            field="elastic.max_restarts",
            default="no limit",
            # torchrun takes both spellings.
            aliases=("--max_restarts",),
            more="Only failures within `--restart-window` count; hosts that come and go do not. In a job with roles it counts for each "
            "worker or role that `--role-policy` restarts.",
        ),
        Option(
            "spares",
            ("--spares",),
            "workers that wait to replace a failed one",
            values.COUNT,
            field="elastic.spares",
            more="They are started beyond `--max-np`, so that they can do it at once.",
        ),
        Option(
            "replicas",
            ("--replicas",),
            "copies of each host's commits on other hosts",
            values.COUNT,
            field="elastic.replicas",
            more="Of [`hvlaunch.torch.checkpoint`](../guides/keep-state.md), for hosts that are lost.",
        ),
        Option(
            "save_to",
            ("--save-to",),
            "directory on disk for commits",
            Value(("DIR",), values.not_empty, completion="directory", path="hosts"),
            field="elastic.save_to",
            default="none",
            more="All hosts must share it. A job with the same directory [continues from it](../guides/keep-state.md#on-disk).",
            example="hvlaunch --min-np 2 -H a:4,b:4 --save-to /shared/run7 python train.py",
        ),
        Option(
            "save_every",
            ("--save-every",),
            "time between two saves to --save-to",
            values.SECONDS,
            field="elastic.save_every",
        ),
        Option(
            "preload",
            ("--preload",),
            "modules that are imported before a worker restarts",
            Value(("MODULES",), values.module_names),
            field="elastic.preload",
            more="Names with commas, such as `torch`; `auto` takes the imports at the top of the script. A second process for each worker "
            "[imports them in advance](../guides/lost-host.md#restart-without-the-imports).",
            example="hvlaunch --min-np 2 -H a:4,b:4 --preload torch python train.py",
        ),
        Option(
            "evict_slow",
            ("--evict-slow",),
            "move the workers of a slow host to a spare",
            Value(("FACTOR",), values.factor),
            field="elastic.evict_slow",
            more="A host that takes at least FACTOR times as long as the others, for a known reason, is moved as by `hvlaunch move HOST`: "
            "once, and at most one host in five minutes.",
            example="hvlaunch --evict-slow 1.5 --spares 8 --max-np 24 -H 'gpu[01-04]:8' python train.py",
        ),
        Option(
            "cooldown",
            ("--blacklist-cooldown-range",),
            "how long a failing host is excluded",
            Value(("MIN", "MAX"), values.seconds, unit="s"),
            # Two words, as horovodrun's.
            field="elastic.cooldown",
            default="for good",
            more="In seconds: MIN at first, then twice as long with each failure, up to MAX.",
            example="hvlaunch --min-np 2 --hostfile hosts --blacklist-cooldown-range 10 300 python train.py",
            convert=values.rising,
        ),
        Option(
            "elastic_timeout",
            ("--elastic-timeout",),
            "time to wait for enough slots",
            values.SECONDS,
            field="elastic.elastic_timeout",
            more="After that the job ends with exit code 75.",
        ),
        Option(
            "reset_timeout",
            ("--reset-timeout",),
            "time to leave a round that has ended",
            values.SECONDS,
            field="elastic.reset_timeout",
            more="After that the worker is killed and replaced.",
        ),
        Option(
            "restart_window",
            ("--restart-window",),
            "time that failures count for `--max-restarts`",
            values.SECONDS,
            field="elastic.restart_window",
        ),
        Option(
            "worker_timeout",
            ("--worker-timeout",),
            "time that a worker may be silent",
            values.SECONDS,
            field="elastic.worker_timeout",
            more="After that it counts as failed; after 4 s if it was stopped by SIGSTOP.",
        ),
        Option(
            "suspect_after",
            ("--suspect-after",),
            "silence of a host after which the others go on without it",
            Value(("SECONDS",), values.from_0, unit="s"),
            field="elastic.suspect_after",
            more="0 waits for `--lease`. Other hosts try to reach the host first. If it answers again, its workers take part again, and no"
            " failure is counted. Only jobs that recover in the process go on so early.",
        ),
        Option(
            "commit_timeout",
            ("--commit-timeout",),
            "time that a round may last without a commit",
            values.SECONDS,
            field="elastic.commit_timeout",
            default="no limit",
        ),
        Option(
            "drain_timeout",
            ("--drain-timeout",),
            "time to a commit where a host leaves",
            values.SECONDS,
            field="elastic.drain_timeout",
            more="After that the workers of the host are stopped.",
        ),
        Option(
            "exit_grace",
            ("--exit-grace",),
            "time for others to end when one worker is done",
            values.SECONDS,
            field="elastic.exit_grace",
            more="After that they are stopped.",
        ),
        Option(
            "discovery_interval",
            ("--discovery-interval",),
            "time between two looks for changed hosts",
            values.SECONDS,
            field="elastic.discovery_interval",
            more="A look is a run of the discovery script, or a glance at the hostfile.",
        ),
        Option(
            "discovery_timeout",
            ("--discovery-timeout",),
            "time for the discovery script to end",
            values.SECONDS,
            field="elastic.discovery_timeout",
        ),
    ),
)


_HOSTS = OptionGroup(
    "hosts",
    pages=(
        ("Hosts", "../../hostfiles/README.md#hosts"),
        ("jobs of schedulers", "mpi.md"),
        ("warm pools", "../guides/pools.md"),
        ("firewalls", "rendezvous.md#what-to-open-in-a-firewall"),
        ("networks", "../guides/network.md"),
    ),
    options=(
        Option(
            "hosts",
            ("-H", "--hosts"),
            "hosts and their slots, separated by commas",
            Value(("HOST,...",), completion="hosts"),
            default="the hosts of the scheduler's job around hvlaunch, else this machine with `-np` slots",
            more="A host is `host`, `host:slots`, `user@host:slots`, a range such as `gpu[01-04]:8`, or an IPv6 address, "
            "`[fe80::1]:4`.",
            example="hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py",
            aliases=("-host", "--host", "-hosts"),
            # Several -H add up.
            repeats="join",
            excludes="hosts",
            is_everyday=True,
        ),
        Option(
            "hostfile",
            # horovodrun has one dash, and Open MPI both.
            ("--hostfile", "-hostfile"),
            "file with one host on each line",
            Value(("FILE",), completion="file", path="here"),
            more="A line may also say the slots of the host and how it is reached. In an elastic job the file is read "
            "again when it changes.",
            example="hvlaunch --hostfile hosts python train.py",
            aliases=("-machinefile", "--machinefile"),
            excludes="hosts",
            is_everyday=True,
        ),
        Option(
            "pool",
            ("--pool",),
            "warm pool whose hosts the job uses",
            Value(("NAME",)),
            field="pool",
            more="`hvlaunch pool up NAME -H HOSTS` keeps connections to the hosts, so that jobs start sooner. Without `-H` the job uses "
            "all hosts of the pool. SSH options are fixed by `pool up`, and have no effect here. An empty name means no pool.",
            # An empty name takes back the pool of a file or a variable.
            convert=values.or_none,
            source="own",
        ),
        Option(
            "slots_per_host",
            ("--slots-per-host",),
            "slots of hosts for which none are given",
            # torchrun's words gpu and auto mean the default.
            Value(("N",), values.slots_or_gpus),
            field="slots_per_host",
            default="the number of the host's GPUs, else 1",
            aliases=("--slots",),
        ),
        Option(
            "force_slots",
            ("--force-slots",),
            "use numbers of slots that look like a mistake",
            more="A host may have 64 slots, or 8 for each of its processors. More are refused, since the number after a host's "
            "name is its slots, and not its port.",
        ),
        Option(
            "avoid_suspects",
            ("--avoid-suspects",),
            "use hosts last that have failed in earlier jobs",
            more="`hvlaunch hosts` shows them. Such a host gets workers only if the others have too few slots, and is the last to "
            "replace a lost one.",
            example="hvlaunch --avoid-suspects --spares 1 --max-np 24 -H 'gpu[01-04]:8' python train.py",
        ),
        Option(
            "no_scheduler",
            ("--no-scheduler",),
            "ignore the scheduler's job around hvlaunch",
            more="Inside a job of Slurm, LSF, PBS, Grid Engine or the MPI operator, its hosts are used where neither `-H` "
            "nor `--hostfile` names others.",
        ),
        Option(
            "check",
            ("--check",),
            "compare the hosts before the workers start",
            field="check",
            more="A fault that would stop the job ends it with exit code 69, or leaves the host out with `--skip-bad-hosts`. In an "
            "elastic job each host is checked before it joins, also one that was lost. hvlaunch check shows all values.",
            example="hvlaunch --check -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "skip_bad_hosts",
            ("--skip-bad-hosts",),
            "continue without hosts that fail before the workers start",
            field="skip_bad_hosts",
            more="The other hosts must have enough slots for `-np`. List more hosts than needed: all are connected, and the first good "
            "ones get the workers. hvlaunch says which were skipped, and why. A host that does not answer is waited for as "
            "long as `--start-timeout` says, unless those before it have enough slots.",
            example="hvlaunch --skip-bad-hosts -np 8 -H 'gpu[01-03]:4' python train.py",
        ),
        Option(
            "network_interfaces",
            ("--network-interfaces", "--network-interface"),
            "network interfaces for the workers",
            Value(("NAME,NAME",)),
            field="network_interfaces",
            default="found by trying: each host connects to the others' addresses",
            more="On each host the first of them that has an address is used, and nothing is tried.",
            example="hvlaunch -H a:4,b:4 --network-interfaces ib0,eth0 python train.py",
            repeats="list",
            convert=values.names,
        ),
        Option(
            "nccl",
            ("--nccl",),
            "choose the adapters for NCCL and Gloo",
            Value(choices=get_args(NcclPolicy)),
            field="nccl",
            more="`auto`: hosts read their adapters from /sys, and workers get NCCL_IB_HCA and its like for adapters that reach each "
            "other on all hosts. Variables that you set stay. `--verbose` prints the reasons.",
            example="hvlaunch -H a:8,b:8 --nccl auto --verbose python train.py",
        ),
        Option(
            "rank_order",
            ("--rank-order",),
            "order of the hosts by rank",
            Value(choices=get_args(RankOrder)),
            field="rank_order",
            more="`given`: as you name them. `fabric`: hosts of one NVLink cluster, InfiniBand subnet or RDMA network side by side. `measured`: also by "
            "connection times between hosts. Your first host stays first.",
            example="hvlaunch -H 'gpu[01-16]:8' --rank-order fabric python train.py",
        ),
        Option(
            "rendezvous_relay",
            ("--rendezvous-relay",),
            "how workers reach the rendezvous server",
            Value(choices=get_args(RelayPolicy)),
            field="relay",
            more="`auto`: through the ssh connection where a host cannot connect to this machine; `always`: through the ssh "
            "connection; `never`: directly.",
        ),
        Option(
            "rendezvous_port",
            ("--rendezvous-port",),
            "this machine's port for the rendezvous server",
            Value(("PORT",), values.port_or_any),
            field="rendezvous_port",
            default="a free port",
            more="For a firewall in front of this machine.",
            source="own",
        ),
        Option(
            "rendezvous_bind",
            ("--rendezvous-bind",),
            "this machine's address for the rendezvous server",
            Value(("ADDRESS",), values.address),
            field="rendezvous_bind",
            default="this machine's addresses that its hosts can use",
            more="The server also listens on the loopback address, and only there if every host is this machine or uses "
            "`--rendezvous-relay always`. `0.0.0.0` and `::` are all addresses.",
            example="hvlaunch -H a:4,b:4 --rendezvous-bind 10.0.0.9 python train.py",
            source="own",
        ),
        Option(
            "worker_port_range",
            ("--worker-port-range",),
            "ports of the workers, on every host",
            Value(("LOW-HIGH",), values.ports),
            field="worker_ports",
            default="any",
            more="For a firewall between the hosts. `MASTER_PORT` is one of them.",
            example="hvlaunch -H a:4,b:4 --worker-port-range 29500-29599 python train.py",
        ),
    ),
)

_WORKERS = OptionGroup(
    "workers",
    pages=(("What each worker gets", "environment.md"),),
    options=(
        Option(
            "np",
            ("-np", "--num-proc"),
            "number of workers",
            values.NUMBER,
            # Spellings of mpirun and srun.
            aliases=("-n", "--n", "--np"),
            field="np",
            default="one in every slot",
            more="They fill the slots in the order of the hosts.",
            example="hvlaunch -np 2 python train.py",
            is_everyday=True,
        ),
        Option(
            "cwd",
            ("--cwd",),
            "working directory of the workers",
            # Not checked here: the directory must exist on the hosts.
            Value(("DIR",), values.not_empty, completion="directory", path="hosts"),
            default="this directory",
            aliases=("-wdir", "--wdir", "-wd", "--wd"),
            more="It is the same on every host. A relative one counts from this directory.",
            is_everyday=True,
        ),
        Option(
            "stdin",
            ("--stdin",),
            "ranks that read hvlaunch's standard input",
            Value(choices=get_args(StdinPolicy)),
            field="stdin",
            more="`0`: rank 0; `all`: every rank; `none`: no rank.",
        ),
    ),
)

_OUTPUT = OptionGroup(
    "output",
    pages=(("Output", "output.md"), ("Events", "../interfaces/events.md")),
    options=(
        Option(
            "output_filename",
            ("--output-filename",),
            "directory for files with each worker's output",
            values.DIRECTORY,
            field="output_dir",
            # torchrun's spellings.
            aliases=("--log-dir", "--log_dir"),
            more="Each job makes a folder in it: the files are `DIR/JOB/rank.N/stdout` and `DIR/JOB/rank.N/stderr`, and `DIR/latest` "
            "leads to the newest. The output is shown here as well.",
            example="hvlaunch -np 2 --output-filename logs python train.py",
            convert=Path,
            is_everyday=True,
        ),
        Option(
            "prefix",
            ("--prefix",),
            "text before each line of a worker",
            Value(("TEMPLATE",)),
            field="console.prefix",
            more="Fields are `{rank}`, `{host}`, `{local_rank}`, `{time}` and `{stream}`, with formats such as `{rank:03}` or "
            "`{time:%H:%M:%S}`.",
            example="hvlaunch -np 2 --prefix '{time:%H:%M:%S} {host}/{local_rank} ' python train.py",
            # Without a prefix of its own, a worker's line can look like a message of hvlaunch's.
            source="own",
        ),
        Option(
            "prefix_timestamp",
            ("--prefix-output-with-timestamp", "-prefix-timestamp"),
            "put the time before the prefix",
        ),
        Option(
            "color",
            ("--color",),
            "colour of prefixes, one for each rank",
            Value(choices=get_args(ColorPolicy)),
            field="console.color",
            more="`auto`: on a terminal, unless `NO_COLOR` is set.",
        ),
        Option(
            "ranks",
            ("--ranks",),
            "ranks whose output is shown",
            Value(("LIST",), values.ranks),
            field="console.ranks",
            default="all",
            more="Files of output and the failure report have all ranks.",
            example="hvlaunch -np 16 -H a:8,b:8 --ranks 0,8-15 python train.py",
        ),
        Option(
            "merge",
            ("--merge",),
            "print equal lines of several ranks once",
            field="console.merge",
            more="The prefix of such a line lists the ranks that printed it. The lines must come at about the same time.",
        ),
        Option(
            "events",
            ("--events",),
            "file to append a JSON object to for each event",
            values.FILE,
            field="events",
            convert=Path,
            source="own",
        ),
        Option(
            "report",
            ("--report",),
            "file for the failure report: `.json`, or `.html`",
            values.FILE,
            field="report",
            more="The page is one file that you can send to somebody. The file is written when the job has ended, also if it went well, and "
            "replaces one that is there.",
            example="hvlaunch -np 8 -H a:4,b:4 --report report.html python train.py",
            convert=values.report_path,
            source="own",
        ),
        Option(
            "notify",
            ("--notify",),
            "send word of failures, hangs, recoveries and the end",
            Value(("TARGET",), values.notify_target),
            field="notify",
            repeats="list",
            convert=tuple,
            more="TARGET is an address of the web such as a Slack or Discord webhook or a topic of ntfy, a command that reads JSON, or "
            "`mail:ADDRESS`. `slack+https://` and `ntfy+https://` are for servers of your own.",
            example="hvlaunch -np 8 -H a:4,b:4 --notify https://ntfy.sh/my-jobs python train.py",
            source="own",
        ),
        Option(
            "notify_on",
            ("--notify-on",),
            "events for --notify",
            Value(("EVENT,EVENT",), values.notify_events),
            field="notify_on",
            repeats="list",
            convert=values.flat,
            default="failed,hung,recovered,done",
        ),
        Option(
            "quiet",
            ("--quiet",),
            "print only output, errors and failure report",
            # A found file must not silence the line about its own options.
            field="console.quiet",
            more="Other messages of hvlaunch are left out, such as the lines at the start and at the end of a job.",
            excludes="loudness",
            source="own",
        ),
        Option(
            "verbose",
            ("-v", "--verbose"),
            "print what hvlaunch does, and its tracebacks",
            field="verbose",
            excludes="loudness",
            is_everyday=True,
        ),
    ),
)

_ENDING = OptionGroup(
    "ending",
    pages=(
        ("Exit codes", "exit-codes.md"),
        ("When a job fails", "../guides/failures.md#what-ends-a-job-and-what-ctrl-c-leaves"),
    ),
    options=(
        Option(
            "grace",
            ("--grace",),
            "time between asking a worker to stop and killing it",
            values.SECONDS,
            field="grace",
        ),
        Option(
            "settle",
            ("--settle",),
            "time that a failure waits for its cause",
            Value(("SECONDS",), values.from_0, unit="s"),
            field="settle",
            more="Where the first worker that fails seems to have lost its connection to another one, the others are stopped "
            "that much later, unless a worker fails before for an error of its own; any other failure stops them at once. "
            "0 never waits.",
        ),
        Option(
            "hang_timeout",
            ("--hang-timeout",),
            "time without progress after which a job hangs",
            # 0 turns the check off, so this is not values.SECONDS.
            Value(("SECONDS",), values.from_0, unit="s"),
            field="hang_timeout",
            more="A job hangs when no rank has printed anything for so long, and none computes, reads or writes "
            "meanwhile: hvlaunch says then which rank the others wait for, and at which line. 0 never looks.",
        ),
        Option(
            "on_hang",
            ("--on-hang",),
            "what follows when a job hangs",
            Value(choices=get_args(OnHang)),
            field="on_hang",
            more="`warn` says so, and waits. `stop` ends the job with exit code 76. `restart` begins a new round of an elastic "
            "job, and ends any other as `stop` does.",
            example="hvlaunch -np 8 -H a:4,b:4 --on-hang stop python train.py",
        ),
        Option(
            "lease",
            ("--lease",),
            "silence after which hvlaunch and a host give each other up",
            values.SECONDS,
            field="lease",
            more="The host stops its workers then, and hvlaunch stops the job, or continues without the host if the job is "
            "elastic. For elastic jobs and pools, and with --detach and --detach-on-hangup, it is 30 s, unless it is given.",
        ),
        Option(
            "reconnect_timeout",
            ("--reconnect-timeout",),
            "time that a host waits for a connection that was lost",
            values.SECONDS,
            field="reconnect_timeout",
            more="hvlaunch connects again at once, and repeats that; the workers continue meanwhile, and nothing is lost. When "
            "the time is over, the host stops its workers: so this is also how long they outlive an hvlaunch that was killed. "
            "It is at most --lease, which is what counts where a connection is only silent. With --detach and --detach-on-hangup "
            "it is --lease, unless it is given.",
        ),
        Option(
            "spill",
            ("--spill",),
            "output that a host keeps while its connection is lost",
            values.SIZE,
            field="spill",
            default="64M",
            more="It is kept in a file in the job's private directory there, and sent later. When that is full, the workers wait "
            "with their next line. With 0 there is no file.",
        ),
        Option(
            "fsync",
            ("--fsync",),
            "let the job be taken over after a loss of power here too",
            field="fsync",
            more="What it needs is written to the job's directory in any case, and outlives hvlaunch itself. With this option each "
            "event is synced to disk before hvlaunch acts on it, which takes some milliseconds each time. The last seconds of "
            "stored output may then be lost.",
        ),
        Option(
            "end_with_rank",
            ("--end-with-rank",),
            "rank that ends the job when it exits",
            Value(("RANK",), values.count),
            field="end_with_rank",
            default="the job ends when all ranks have",
            more="When it has ended with 0, the others are stopped, and the exit code is 0: for servers that would run for "
            "ever, as those of Ray. A rank that fails before still ends the job.",
            example="hvlaunch --end-with-rank 0 -np 4 -H gpu01:2,gpu02:2 python train.py",
        ),
    ),
)

GROUPS = (
    _HOSTS,
    BINDING,
    LEASES,
    _WORKERS,
    FILES,
    PROGRAMS,
    CONTAINERS,
    ENVIRONMENT,
    _OUTPUT,
    SSH,
    _ENDING,
    ELASTIC,
    CONTROLLER,
    FAMILIAR,
    HOROVOD,
    GENERAL,
)
"""Groups in the order of help."""

# The user's command is an option, with a name, only in files and variables.
COMMAND = Option("command", ("command",), "what to start, and its arguments", Value(("COMMAND", "ARG")))
