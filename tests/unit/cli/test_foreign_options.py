"""Options of other launchers: the table has all of them, and each is answered with what to write here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ClusterShell.CLI import OptionParser

from docs.options_pages import coming_from_page as page
from hvlaunch.cli.arguments import parse
from hvlaunch.cli.foreign import LAUNCHERS, key, rows_of
from hvlaunch.cli.main import main
from hvlaunch.cli.options import by_name
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.errors import BadUsage

PROGRAMS = {name: launcher.options for name, launcher in LAUNCHERS.items()}
OURS = by_name(GROUPS)
ROWS = [(program, option) for program, options in PROGRAMS.items() for option in options]
PASSED = re.compile(r"'[^']*'|\"[^\"]*\"|python -m|numactl \S+|taskset -c|sh -c")
"""What is not hvlaunch's in an answer: the options of others."""


def answer(line):
    with pytest.raises(BadUsage) as caught:
        parse(shlex.split(line))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-ppn 4 true", "-ppn is mpirun's: here write --slots-per-host 4"),
        ("-env A true", "-env is mpirun's: here write -x A=true"),
        ("-genv A 1 true", "-genv is mpirun's: here write -x A=1"),
        (
            "-N 4 true",
            "-N is mpirun's: here write --slots-per-host 4; or srun's: here write --nnodes 4, or",
        ),
        ("-N4 true", "-N is mpirun's: here write --slots-per-host 4; or srun's: "),
        ("--bind-to core true", "--bind-to is mpirun's: here write --mpi --binding-args='--bind-to core'"),
        (
            "-mca coll tuned true",
            "-mca is mpirun's: here write --network-interfaces NAME; for Open MPI: --mpi --mpi-args='-mca coll tuned'",
        ),
        ("-mca btl_tcp_if_include ib0 true", "try: hvlaunch --network-interfaces ib0 true"),
        (
            "--output tag true",
            "--output is mpirun's: here write --output-filename DIR, --prefix or -prefix-timestamp; or ",
        ),
        (
            "--log_line_prefix_template=${hostname}:${rank} true",
            "torchrun's: here write a --prefix, whose fields are rank, local_rank and host in braces",
        ),
        ("--num_gpus 8 true", "--num_gpus is deepspeed's: here write --slots-per-host 8"),
        ("--num_nodes=2 true", "--num_nodes is deepspeed's: here write --nnodes 2"),
        ("--num-processes 4 true", "--num-processes is accelerate's: here write -np 4"),
        ("--ntasks=8 true", "--ntasks is srun's: here write -np 8"),
        ("-w a,b true", "-w is srun's: here write -H a,b; or pdsh's and clush's: here write -H a,b, and "),
        (
            "--cpu-bind=cores true",
            "--cpu-bind is srun's: here write --srun --binding-args='--cpu-bind=cores', in a job",
        ),
        (
            "--gres=gpu:4 true",
            "--gres is srun's, and hvlaunch has nothing like it: give it to salloc or sbatch",
        ),
        ("--fsdp_version 2 true", "--fsdp_version is accelerate's: here write -x FSDP_VERSION=2"),
        ("--default-hostfile \\'a true", "here write --hostfile ''\"'\"'a'"),
        ("--default-hostfile", "here write --hostfile FILE"),
        ("--default-hostfile=h true", "--default-hostfile is mpirun's: here write --hostfile h"),
        (
            "-t 3 true",
            "-t is torchrun's and accelerate's: here write --tee 3 --output-filename logs, or another directory; or srun's: ",
        ),
        ("-c 4 true", "-c is mpirun's: here write -np 4; or srun's: "),
        ("-l -w a true", "or pdsh's and clush's: here write --ssh-user USER"),
        ("-u true", "here write timeout SECONDS hvlaunch ..."),
        ("--ipex true", "--ipex is accelerate's: here write -x ACCELERATE_USE_IPEX=true"),
        (
            "-g gpu -w a,b uptime",
            "-g is pdsh's and clush's, and hvlaunch has nothing like it: hosts have no groups; -H \"$(nodeset ",
        ),
        ("--max_elastic_nodes 4 true", "here write --nnodes N:M with --nproc-per-node"),
        ("--num_machines 2 true", "here write --nnodes 2, and -H a:4,b:4 with the hosts"),
        ("--deepspeed_inclusion_filter a@b true", "here write --include a@b"),
        ("--get-stack-traces true", "here write 'hvlaunch stacks JOB' while it runs"),
        ("--dvm true", "here write --pool NAME, of a warm pool"),
        (
            "-g gpu -w a,b uptime",
            "\n-w is pdsh's and clush's: here write -H a,b, and --slots-per-host 1 for one worker on each host",
        ),
    ],
)
def test_the_answer(line, text):
    assert text in answer(line)


@pytest.mark.parametrize(
    "line",
    [
        "-genv API_KEY hunter2 true",
        "--launcher_args=--password=hunter2 true",
        "-mca secret hunter2 true",
        "-env PGPASSWORD hunter2 true",
        "--no-such-token=hunter2 true",
    ],
)
def test_what_may_be_a_secret_is_not_repeated(line):
    assert "hunter2" not in answer(line)


def test_torchruns_restarts_are_hvlaunchs_by_either_spelling():
    assert parse(["--max_restarts=3", "true"]).max_restarts == 3
    assert "--max_restarts=3" in answer("--nnodes 1 --max_restarts=3 --shutdown-timeout 9 true")


NOT_NEEDED = [
    ("--oversubscribe true", "--oversubscribe is mpirun's and srun's, and not needed here: "),
    ("--allow-run-as-root true", "--allow-run-as-root is mpirun's, and not needed here: root may start jobs"),
    ("--tag-output true", "--tag-output is mpirun's, and not needed here: each line has its rank"),
    ("-bind-to none -np 2 true", "-bind-to is mpirun's, and not needed here: workers are not bound"),
    (
        "--rdzv-id=100 --rdzv-backend=c10d --rdzv_endpoint h1:29400 true",
        "--rdzv-id, --rdzv-backend and --rdzv_endpoint are torchrun's, and not needed here: hvlaunch's own",
    ),
]


@pytest.mark.parametrize(("line", "text"), NOT_NEEDED)
def test_options_that_mean_nothing_here_are_a_warning_and_the_job_runs(line, text):
    warnings: list[str] = []
    assert parse(line.split(), warn=warnings.append).command == ("true",)
    (warning,) = warnings
    assert warning.startswith(f"warning: {text}")


def test_quiet_is_without_these_warnings():
    warnings: list[str] = []
    parse(["--quiet", "--standalone", "true"], warn=warnings.append)
    assert warnings == []


def test_a_line_is_answered_up_to_the_first_unknown_option():
    lines = answer("--nnodes=2 -np 4 -t 3 -v --virtual-local-rank --bogus --nproc-per-node 4 x").split("\n")
    assert [line.split()[0] for line in lines] == ["-t", "--virtual-local-rank"]
    assert all("torchrun's" in line for line in lines)
    assert "--bogus" in answer("--standalone --bogus x")


def test_a_line_of_one_launchers_options_is_read_as_that_launchers():
    assert "srun's" in answer("-r 3 true")
    assert "srun's" not in answer("--standalone -r 3 true")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "-v --num_processes 4 --machine_rank 0 --mixed_precision=fp16 python 'a b'",
            "have other names here; try: hvlaunch -v -np 4 -x ACCELERATE_MIXED_PRECISION=fp16 python 'a b'",
        ),
        ("--num_nodes=2 x --num_nodes 3", "; try: hvlaunch --nnodes 2 x --num_nodes 3"),
        ("--logs-specs a --local-ranks-filter 0 x", "; try: hvlaunch --ranks 0 x"),
    ],
)
def test_the_whole_line_is_ready_to_paste(line, text):
    assert answer(line).endswith(text)


def test_a_line_with_an_unknown_option_has_no_line_to_paste():
    assert "try:" not in answer("--num_nodes=2 --bogus x")


TRANSLATIONS = [
    (
        "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=100 --rdzv-backend=c10d --rdzv-endpoint=h1:1 train.py --lr 3",
        "hvlaunch --nnodes=2 --nproc-per-node=2 python train.py --lr 3",
        ["--rdzv-id, --rdzv-backend and --rdzv-endpoint are torchrun's", "the line names no hosts"],
    ),
    (
        "torchrun --standalone -m train.main",
        "hvlaunch -m train.main",
        ["--standalone is torchrun's, and not needed"],
    ),
    (
        "CUDA_VISIBLE_DEVICES=0,1 /opt/bin/python3 -m torch.distributed.run -r 3 train.py",
        "hvlaunch -x CUDA_VISIBLE_DEVICES=0,1 --redirects 3 --output-filename logs python train.py",
        [],
    ),
    (
        "deepspeed --hostfile=hosts --num_nodes=2 --num_gpus 4 train.py --deepspeed",
        "hvlaunch --hostfile=hosts --nnodes 2 --slots-per-host 4 python train.py --deepspeed",
        [],
    ),
    (
        "mpirun -np 4 -H h1:2,h2:2 -bind-to none -map-by slot -x A -mca pml ob1 -mca btl ^openib python train.py",
        "hvlaunch -np 4 -H h1:2,h2:2 -map-by slot -x A python train.py",
        ["-bind-to is mpirun's", "-mca is mpirun's, and not needed here"],
    ),
    (
        "accelerate launch --multi_gpu --mixed_precision=fp16 --num_processes 4 --no_python ./train",
        "hvlaunch -x ACCELERATE_MIXED_PRECISION=fp16 -np 4 --no_python ./train",
        ["--multi_gpu is accelerate's, and not needed"],
    ),
    (
        "horovodrun -np 8 -H a:4,b:4 python train.py",
        "hvlaunch --horovod -np 8 -H a:4,b:4 python train.py",
        [],
    ),
    ("horovodrun -np 8 --min-np 4 train", "hvlaunch -np 8 --min-np 4 train", []),
    (
        "srun -n 8 --ntasks-per-node 4 --gres=gpu:4 python train.py",
        "hvlaunch -n 8 --slots-per-host 4 python train.py",
        ["--gres is srun's, and hvlaunch has nothing like it: give it to salloc"],
    ),
    ("pdsh -w a,b -x c uptime", "hvlaunch -H a,b uptime", ["-x is pdsh's, and means something else here"]),
]


@pytest.mark.parametrize(("line", "ours", "notes"), TRANSLATIONS)
def test_a_line_of_another_launcher_is_translated(line, ours, notes, capsys):
    assert main(["translate", line]) == 0
    out, err = capsys.readouterr()
    assert out == f"{ours}\n"
    printed = err.splitlines()
    assert len(printed) == len(notes)
    assert all(text.startswith(f"hvlaunch: note: {note}") for text, note in zip(printed, notes, strict=True))
    assert parse(shlex.split(ours)[1:])


def test_the_words_of_a_line_need_no_quotes(capsys):
    assert main(["translate", "torchrun", "--nproc-per-node", "2", "a b.py"]) == 0
    assert capsys.readouterr().out == "hvlaunch --nproc-per-node 2 python 'a b.py'\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("kubectl apply", "'kubectl' is none of accelerate, clush"),
        ("accelerate config", "'accelerate' is none of"),
        ("torchrun --bogus x.py", "--bogus is an option of neither torchrun nor hvlaunch"),
        ("torchrun 'x", "the line can't be read: No closing quotation"),
    ],
)
def test_a_line_that_is_not_translated(line, text, capsys):
    assert main(["translate", line]) == 2
    assert text in capsys.readouterr().err


def test_a_short_name_joined_to_its_value_may_be_another_launchers_option():
    options = parse("-xterm -p2222 -Ha:2 true".replace("-xterm", "-xTERM").split())
    assert (options.x, options.ssh_port, options.hosts) == (["TERM"], 2222, "a:2")
    assert "-xterm is mpirun's" in answer("-xterm 0 true")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_row(program):
    for option in PROGRAMS[program]:
        is_ours = {name in OURS for name in option.names}
        assert all(re.fullmatch(r"--?[A-Za-z0-9][-\w]*", name) for name in option.names), option
        assert is_ours == {option.becomes in ("same", "another meaning")}, option
        assert bool(option.here) is (option.becomes != "same"), option
        literals = [metavar for metavar in option.metavars if metavar.upper() != metavar]
        assert set(literals) <= {"none", "pml", "btl", "btl_tcp_if_include", "oob_tcp_if_include"}, option
        assert option.metavars or "{}" not in option.here, option
        shown = re.findall(r"(?<![\w<-])--?[A-Za-z][-\w]*", PASSED.sub("", option.here))
        assert set(shown) <= OURS.keys() | {"-USR1", "-f", "-S"}, option


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_launcher_has_each_name_once(program):
    names = [
        (name, [metavar for metavar in option.metavars if metavar.upper() != metavar])
        for option in PROGRAMS[program]
        for name in option.names
    ]
    assert all(names.count(name) == 1 for name in names)


def test_the_page_tells_elastic_horovodrun_users_about_the_import():
    part = page().partition("## horovodrun")[2].partition("\n## ")[0]
    assert "`import hvlaunch.torch as hvd`" in part


def test_all_of_horovodrun_is_the_same_here_but_v():
    assert {option.spelled for option in PROGRAMS["horovodrun"] if option.becomes != "same"} == {"-v"}
    names = [name for option in PROGRAMS["horovodrun"] for name in option.names]
    assert len(names) > 75


def help_of(program, *words, **environ):
    """All options that a launcher on this machine says it has."""
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    done = subprocess.run(
        [program, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environ},
    )
    return done.stdout + done.stderr


def spelled_in(text):
    return set(re.findall(r"(?<![\w./<-])--?[A-Za-z][-\w]*", text))


def missing(names, *programs):
    known = {key(name) for program in programs for option in PROGRAMS[program] for name in option.names}
    return sorted(name for name in names if key(name).rstrip("-") not in known)


def test_all_of_open_mpi():
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    text = help_of("mpirun.openmpi", "--help", "full", **allowed)
    names = spelled_in("\n".join(re.findall(r"^ *(-\S+)", text, re.MULTILINE)).replace("|", " "))
    assert len(names) > 90
    assert missing(names, "mpirun (Open MPI)") == []


def test_all_of_mpich():
    text = help_of("mpirun.mpich", "-help")
    names = spelled_in("\n".join(re.findall(r"^ *(-\S+)", text, re.MULTILINE)).replace("/", " "))
    assert len(names) > 35
    assert missing(names, "mpirun (MPICH)") == []


def test_all_of_srun(tmp_path):
    config = tmp_path / "slurm.conf"
    config.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=d Nodes=ALL\n"
    )
    text = help_of("srun", "--help", SLURM_CONF=str(config))
    names = spelled_in("\n".join(re.findall(r"^ +((?:-\w, +)?-[-\w]+)", text, re.MULTILINE)))
    assert len(names) > 120
    assert missing(names, "srun") == []


def test_all_of_torchrun():
    spec = find_spec("torch")
    if spec is None:
        pytest.skip("no torch here")
    text = Path(str(spec.origin)).with_name("distributed").joinpath("run.py").read_text()
    names = set(re.findall(r'^ +"(--?[a-z][-\w]*)",$', text, re.MULTILINE))
    assert len(names) > 40
    assert missing(names, "torchrun") == []


def test_all_of_clush():
    text = Path(OptionParser.__file__).read_text().partition("def install_nodeset_commands")[0]
    names = {
        name
        for call in re.findall(r"add_option\(([^)]*)", text)
        for name in re.findall(r'"(--?\w[-\w]*)"', call)
    }
    assert len(names) > 50
    assert missing(names - {"--separator"}, "clush") == []  # which is clubak's


def test_the_table_is_not_loaded_for_a_line_that_needs_none():
    script = "import sys; from hvlaunch.cli.arguments import parse; parse(sys.argv[1:]); print(*sys.modules)"
    for line, is_loaded in (("-np 2 -H a:4 -xA=1 -p2222 true", False), ("-xterminal true", True)):
        done = subprocess.run(
            [sys.executable, "-c", script, *line.split()], capture_output=True, text=True, check=True
        )
        assert ("hvlaunch.cli.foreign" in done.stdout.split()) is is_loaded


def test_dashes_and_underscores_are_all_one():
    assert (
        {row.program for row in rows_of("--rdzv_endpoint")}
        == {row.program for row in rows_of("-rdzv-endpoint")}
        == {"torchrun"}
    )


def test_the_page_in_docs_is_the_one_that_the_tables_make():
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "docs/options_pages.py", "coming-from.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (root / "docs/reference/coming-from.md").read_text(), "make options-page"


def test_its_command_lines_are_right_and_all_is_said_of_every_option():
    text = page()
    blocks = re.findall(r"```sh\n(.*)\n(.*)\n```", text)
    assert len(blocks) == len(PROGRAMS)
    for _, line in blocks:
        words = shlex.split(line)
        options = parse(words[words.index("hvlaunch") + 1 :])
        assert options.command[0] == "python"
    assert all(f"`{option.spelled}`" in text for _, option in ROWS)
    assert "{" not in re.sub(r"'\{host\}: '", "", text)
    for row in re.findall(r"^\| .*$", text, re.MULTILINE):
        assert row.count("`") % 2 == 0
        assert row.count("|") == 3
