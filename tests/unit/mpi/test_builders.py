"""Each builder's whole command line, word for word."""

from typing import Any

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.mpi import Kind, LauncherProgram
from hvlaunch.mpi.builders import LaunchRequest, build, rankfile

MANY = tuple((f"n{number:02}", 8) for number in range(64))
MANY_LISTED = ",".join(f"n{number:02}:8" for number in range(64))

CASES: dict[str, dict[str, Any]] = {
    "minimal": {"hosts": (("a", 4), ("b", 4))},
    "uneven": {"hosts": (("a", 3), ("b", 1))},
    "64 hosts": {"hosts": MANY},
    "ssh": {"hosts": (("a", 1),), "port": 2222, "user": "ml", "identity": "/k", "ssh_words": ("-F", "/c")},
    "interface": {"hosts": (("a", 1),), "interfaces": ("ib0",)},
    "binding": {"hosts": (("a", 1),), "binding": ("--bind-to", "core")},
    "extra": {"hosts": (("a", 1),), "extra": ("--verbose", "1")},
    "environment": {"hosts": (("a", 1),), "env": ("A", "B")},
    "root": {"hosts": (("a", 1),), "root": True},
    "output": {"hosts": (("a", 1),), "tag": True, "timestamp": True, "output": "/out"},
    "directory": {"hosts": (("a", 1),), "cwd": "/w d"},
}

UNBOUND = "--bind-to none --map-by slot"
OPEN_MPI_4 = {
    "minimal": f"-np 8 -H a:4,b:4 {UNBOUND}",
    "uneven": f"-np 4 -H a:3,b:1 {UNBOUND}",
    "64 hosts": f"-np 512 -H {MANY_LISTED} {UNBOUND}"
    " --mca plm_rsh_no_tree_spawn true --mca plm_rsh_num_concurrent 64",
    "ssh": f"-np 1 -H a:1 {UNBOUND} --mca plm_rsh_args|-p 2222 -l ml -i /k -F /c",
    "interface": f"-np 1 -H a:1 {UNBOUND} --mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0",
    "binding": "-np 1 -H a:1 --bind-to core",
    "extra": f"-np 1 -H a:1 {UNBOUND} --verbose 1",
    "environment": f"-np 1 -H a:1 {UNBOUND} -x A -x B",
    "root": f"--allow-run-as-root -np 1 -H a:1 {UNBOUND}",
    "output": f"-np 1 -H a:1 --tag-output --timestamp-output --output-filename /out {UNBOUND}",
    "directory": f"-np 1 -H a:1 {UNBOUND} --wdir|/w d",
}
OPEN_MPI_5 = OPEN_MPI_4 | {
    "64 hosts": f"-np 512 -H {MANY_LISTED} {UNBOUND}"
    " --prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 64",
    "ssh": f"-np 1 -H a:1 {UNBOUND} --prtemca plm_ssh_args|-p 2222 -l ml -i /k -F /c",
    "interface": f"-np 1 -H a:1 {UNBOUND} --mca btl_tcp_if_include ib0 --prtemca prte_if_include ib0",
    "output": f"-np 1 -H a:1 --output tag,timestamp,dir=/out {UNBOUND}",
}
SPECTRUM = {case: line.replace("-np", "-tcp -np", 1) for case, line in OPEN_MPI_4.items()}
MPICH = {
    "minimal": "-np 8 -hosts a:4,b:4 -bind-to none -genvnone",
    "uneven": "-np 4 -hosts a:3,b:1 -bind-to none -genvnone",
    "64 hosts": f"-np 512 -hosts {MANY_LISTED} -bind-to none -genvnone",
    "ssh": "-np 1 -hosts a:1 -bind-to none -launcher ssh -genvnone",
    "interface": "-np 1 -hosts a:1 -bind-to none -iface ib0 -genvnone",
    "binding": "-np 1 -hosts a:1 --bind-to core -genvnone",
    "extra": "-np 1 -hosts a:1 -bind-to none -genvnone --verbose 1",
    "environment": "-np 1 -hosts a:1 -bind-to none -genvlist A,B",
    "root": "-np 1 -hosts a:1 -bind-to none -genvnone",
    "output": "-np 1 -hosts a:1 -prepend-rank -outfile-pattern /out/rank.%r.stdout"
    " -errfile-pattern /out/rank.%r.stderr -bind-to none -genvnone",
    "directory": "-np 1 -hosts a:1 -bind-to none -wdir|/w d|-genvnone",
}
_AFFINITY = "-genvlist MV2_ENABLE_AFFINITY,MVP_ENABLE_AFFINITY"
MVAPICH = {case: line.replace("-genvnone", _AFFINITY) for case, line in MPICH.items()} | {
    "binding": MPICH["binding"],
    "environment": "-np 1 -hosts a:1 -bind-to none -genvlist A,B,MV2_ENABLE_AFFINITY,MVP_ENABLE_AFFINITY",
}
MANY_NAMES = ",".join(name for name, _ in MANY)
INTEL = {
    "minimal": "-genvnone -hosts a,b -ppn 4 -n 8",
    "uneven": "-genvnone -n 3 -host a train|x y|: -n 1 -host b",
    "64 hosts": f"-genvnone -hosts {MANY_NAMES} -ppn 8 -n 512",
    "ssh": "-bootstrap ssh -bootstrap-exec-args|-p 2222 -l ml -i /k -F /c|-genvnone -hosts a -ppn 1 -n 1",
    "interface": "-iface ib0 -genvnone -hosts a -ppn 1 -n 1",
    "binding": "-genvnone --bind-to core -hosts a -ppn 1 -n 1",
    "extra": "-genvnone -hosts a -ppn 1 -n 1 --verbose 1",
    "environment": "-genvlist A,B -hosts a -ppn 1 -n 1",
    "root": "-genvnone -hosts a -ppn 1 -n 1",
    "output": "-prepend-rank -outfile-pattern /out/rank.%r.stdout -errfile-pattern /out/rank.%r.stderr"
    " -genvnone -hosts a -ppn 1 -n 1",
    "directory": "-wdir|/w d|-genvnone -hosts a -ppn 1 -n 1",
}
SRUN_NODE = "--ntasks 1 --nodes 1 --ntasks-per-node 1 --distribution block --nodelist a"
SRUN_END = "--cpu-bind none --export ALL --input none"
SRUN = {
    "minimal": "--ntasks 8 --nodes 2 --ntasks-per-node 4 --distribution block --nodelist a,b " + SRUN_END,
    "uneven": "--ntasks 4 --nodes 2 --distribution arbitrary --nodelist a,a,a,b " + SRUN_END,
    "64 hosts": "--ntasks 512 --nodes 64 --ntasks-per-node 8 --distribution block"
    f" --nodelist {MANY_NAMES} {SRUN_END}",
    "ssh": None,
    "interface": f"{SRUN_NODE} {SRUN_END}",
    "binding": f"{SRUN_NODE} --bind-to core --export ALL --input none",
    "extra": f"{SRUN_NODE} {SRUN_END} --verbose 1",
    "environment": f"{SRUN_NODE} {SRUN_END}",
    "root": f"{SRUN_NODE} {SRUN_END}",
    "output": f"{SRUN_NODE} {SRUN_END} --label --output /out/rank.%t.stdout --error /out/rank.%t.stderr",
    "directory": f"{SRUN_NODE} {SRUN_END} --chdir|/w d",
}
JSRUN = dict.fromkeys(CASES, "--erf_input /erf") | {
    "ssh": None,
    "binding": None,
    "extra": "--erf_input /erf --verbose 1",
    "environment": "--erf_input /erf --env A --env B",
    "output": "--erf_input /erf --stdio_mode prepended --stdio_stdout /out/rank.%t.stdout"
    " --stdio_stderr /out/rank.%t.stderr",
    "directory": "--erf_input /erf --chdir|/w d",
}
LAUNCHERS = [
    (LauncherProgram(Kind.OPEN_MPI, (4, 1, 4), "mpirun"), OPEN_MPI_4),
    (LauncherProgram(Kind.OPEN_MPI, (), "mpirun"), OPEN_MPI_4),
    (LauncherProgram(Kind.OPEN_MPI, (5, 0, 11), "/opt/ompi/bin/mpirun"), OPEN_MPI_5),
    (LauncherProgram(Kind.SPECTRUM, (10, 3, 1), "mpirun"), SPECTRUM),
    (LauncherProgram(Kind.MPICH, (4, 0, 2), "mpirun"), MPICH),
    (LauncherProgram(Kind.MVAPICH, (2, 3, 7), "mpirun"), MVAPICH),
    (LauncherProgram(Kind.INTEL, (2021, 10), "mpirun"), INTEL),
    (LauncherProgram(Kind.SRUN, (), "srun"), SRUN),
    (LauncherProgram(Kind.JSRUN, (), "jsrun"), JSRUN),
]


def words(line):
    """Words by spaces; parts between bars that hold spaces of their own stay whole: `--wdir|/w d`."""
    parts = line.split("|")
    return [word for index, part in enumerate(parts) for word in ([part] if index % 2 else part.split())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("launcher", "lines"), LAUNCHERS, ids=lambda value: str(value) if isinstance(value, tuple) else ""
)
def test_the_command_line(launcher, lines, case):
    request = LaunchRequest(
        program=launcher.program, command=("train", "x y"), rankfile="/erf", **CASES[case]
    )
    if lines[case] is None:
        with pytest.raises(
            BadUsage, match=r"does not use ssh, so flags for ssh can't be used|--binding-args can't be used"
        ):
            build(launcher, request)
        return
    assert build(launcher, request).argv == (launcher.program, *words(lines[case]), "train", "x y")


def test_no_flag_of_an_older_open_mpi_is_used_with_5():
    for case in CASES.values():
        argv = build(LAUNCHERS[2][0], LaunchRequest(program="mpirun", command=("train",), **case)).argv
        single = [
            word for word in argv if word.startswith("-") and not word.startswith("--") and " " not in word
        ]
        assert set(single) <= {"-np", "-H", "-x"}
        assert not {"--tag-output", "--timestamp-output", "--output-filename", "plm_rsh_args"} & set(argv)


@pytest.mark.parametrize("kind", [Kind.MPICH, Kind.MVAPICH, Kind.INTEL])
def test_hydra_takes_one_interface(kind):
    request = LaunchRequest(
        program="mpirun", command=("train",), hosts=(("a", 1),), interfaces=("ib0", "eth0")
    )
    with pytest.raises(BadUsage, match="takes only one network interface, not ib0, eth0"):
        build(LauncherProgram(kind, (), "mpirun"), request)


def test_localhost_is_no_name_for_hydras_other_hosts():
    hosts = (("localhost", 1), ("a", 1))
    with pytest.raises(BadUsage, match="this machine's own name"):
        build(
            LauncherProgram(Kind.MPICH, (), "mpirun"),
            LaunchRequest(program="mpirun", command=("t",), hosts=hosts),
        )
    build(
        LauncherProgram(Kind.MPICH, (), "mpirun"),
        LaunchRequest(program="mpirun", command=("t",), hosts=hosts[:1]),
    )


def test_variables_for_the_launcher_itself():
    def env(kind, **more):
        return dict(
            build(
                LauncherProgram(kind, (), "mpirun"),
                LaunchRequest(program="mpirun", command=("t",), hosts=(("a", 1),), **more),
            ).env
        )

    assert env(Kind.OPEN_MPI) == env(Kind.SPECTRUM, port=7) == {}
    assert env(Kind.MPICH, port=7) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 7", "HVLAUNCH_SPARE": ""}
    assert list(env(Kind.MVAPICH, env=("A",)))[-1] == "HVLAUNCH_SPARE"
    assert env(Kind.MVAPICH)["MV2_ENABLE_AFFINITY"] == "0"
    assert env(Kind.INTEL) == {"I_MPI_PIN": "0", "HVLAUNCH_SPARE": ""}
    assert env(Kind.INTEL, binding=("-x",)) == {"HVLAUNCH_SPARE": ""}


def test_a_word_for_ssh_with_a_space_is_an_error():
    with pytest.raises(BadUsage, match="must not have a space"):
        build(
            LAUNCHERS[0][0],
            LaunchRequest(program="mpirun", command=("t",), hosts=(("a", 1),), identity="/my keys/k"),
        )


def test_the_rankfile_shares_each_hosts_processors_out():
    request = LaunchRequest(
        program="jsrun",
        command=("t",),
        hosts=(("h1", 2), ("h2", 1)),
        cores=(("h1", 42), ("h2", 40), ("h3", 1)),
    )
    assert rankfile(request) == (
        "cpu_index_using: logical\noverlapping_rs: allow\nskip_missing_cpu: allow\n\n"
        "rank: 0: { hostname: h1; cpu: {0-20} ; gpu: * ; mem: * }\n"
        "rank: 1: { hostname: h1; cpu: {21-41} ; gpu: * ; mem: * }\n"
        "rank: 2: { hostname: h2; cpu: {0-39} ; gpu: * ; mem: * }\n"
    )
    with pytest.raises(BadUsage, match="host h3: 2 ranks for 1 processors"):
        rankfile(LaunchRequest(program="jsrun", command=("t",), hosts=(("h3", 2),), cores=(("h3", 1),)))
