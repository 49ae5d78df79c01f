"""The options of pdsh, and of ClusterShell's clush."""

from hvlaunch.cli.foreign.foreign_option import absent, needless, other, same, word

__all__ = ["CLUSH", "PDSH"]

_ONE = "--slots-per-host 1 for one worker on each host"
_GROUPS = 'hosts have no groups; -H "$(nodeset -f -S , @{})" has those of clush'

PDSH = (
    *same("-h", "-V"),
    *word(f"-H {{}}, and {_ONE}", "-w HOSTS"),
    *other("a variable for the workers; hosts to leave out are --exclude HOSTS", "-x HOSTS"),
    *other("a private key", "-i"),
    *other("more messages", "-v"),
    *word("--ssh-user {}", "-l USER"),
    *word("--start-timeout {}", "-t SECONDS"),
    *word("timeout {} hvlaunch ...", "-u SECONDS"),
    *needless("all hosts are connected at the same time; --connect-limit is for one jump host", "-f N"),
    *word("--ssh-client paramiko or openssh; --srun or --mpi", "-R NAME"),
    *word("--prefix=''", "-N"),
    *word("--verbose", "-d"),
    *word("--dry-run", "-q"),
    *word("--check-build", "-L"),
    *needless("the exit code is the first failing worker's", "-S"),
    *needless("stdout and stderr are always apart", "-s"),
    *needless("a second Ctrl-C kills the job", "-b"),
    *absent(_GROUPS, "-g, -X GROUP"),
    *absent("name the hosts: -H or --hostfile", "-a, -A"),
    *word("--hostfile {}", "-F FILE"),
    *needless("in a job of Slurm its hosts are used", "-j JOB"),
    *absent("a partition is for salloc or sbatch", "-P PARTITION"),
    *absent("there are no modules", "-M NAMES"),
)

CLUSH = (
    *same(
        "-h, --help",
        "--version",
        "-v, --verbose",
        "--quiet",
        "--hostfile, --machinefile FILE",
        "--color WHEN",
    ),
    *word(f"-H {{}}, and {_ONE}", "-w HOSTS"),
    *other("a variable for the workers; hosts to leave out are --exclude HOSTS", "-x HOSTS"),
    *other("the number of workers; --stdin none for no standard input", "-n"),
    *other("the port of sshd", "-p"),
    *word("--stdin none", "--nostdin"),
    *word("--quiet", "-q"),
    *word("--verbose", "-d, --debug"),
    *word("--ssh-user {}", "-l, --user USER"),
    *word("--start-timeout {}", "-t, --connect_timeout SECONDS"),
    *word("timeout {} hvlaunch ...", "-u, --command_timeout SECONDS"),
    *needless(
        "all hosts are connected at the same time; --connect-limit is for one jump host", "-f, --fanout N"
    ),
    *word(
        "--ssh-client openssh and --ssh-config FILE, which may have any option of ssh",
        "-o, --options OPTIONS",
    ),
    *word("--ssh-client paramiko or openssh; --srun or --mpi", "-R, --worker NAME"),
    *word("--prefix=''", "-N"),
    *word("--prefix '{host}: '", "-L"),
    *word(
        "--merge, which prints equal lines of several ranks once", "-b, --dshbak, -B, -r, --regroup, --diff"
    ),
    *word("--output-filename {}, which has stdout and stderr of each rank", "--outdir, --errdir DIR"),
    *needless("the exit code is the first failing worker's", "-S, --maxrc"),
    *needless("a first failure ends the job", "-F, --fast"),
    *needless("hvlaunch shows a line with the hosts that it waits for", "-P, --progress"),
    *needless("a jump host is followed as ssh's configuration has it", "--topology FILE"),
    *needless(
        "each host has an agent, to which hvlaunch connects itself",
        "-T, --tree",
        "--grooming SECONDS",
    ),
    *absent(_GROUPS, "-g, --group, -X GROUP"),
    *absent(_GROUPS, "-s, --groupsource NAME"),
    *absent("hosts have no groups", "-G, --groupbase", "--groupsconf FILE"),
    *absent("name the hosts: -H or --hostfile", "-a, --all"),
    *absent("hosts are used in the order that you name them", "--pick N", "--axis RANGE"),
    *absent(
        "files are not copied to hosts; use clush or rsync before", "-c, --copy, --rcopy FILES", "--dest DIR"
    ),
    *absent(
        "hvlaunch has no file of settings; an alias or a script can have them",
        "--conf FILE",
        "-O, --option NAME=VALUE",
    ),
    *other("a Python module; hvlaunch has no modes", "-m MODE"),
    *absent("hvlaunch has no modes", "--mode MODE"),
    *absent("hvlaunch chooses how it waits for its hosts", "-E, --engine NAME"),
    *needless("commands run on the hosts", "--remote VALUE"),
    *needless(
        "%h and such stand for nothing in the command; workers have HVLAUNCH_HOST", "--interpret-keys VALUE"
    ),
)
