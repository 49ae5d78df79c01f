"""Command lines of horovodrun: hvlaunch takes them as they are."""

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.options.familiar import HOROVOD
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage

VARIABLES = {
    "--fusion-threshold-mb 64": ("FUSION_THRESHOLD", "67108864"),
    "--fusion-threshold-mb 0": ("FUSION_THRESHOLD", "0"),
    "--cycle-time-ms 3.5": ("CYCLE_TIME", "3.5"),
    "--cycle-time-ms 10": ("CYCLE_TIME", "10"),
    "--cache-capacity 2048": ("CACHE_CAPACITY", "2048"),
    "--hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "1"),
    "--no-hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "0"),
    "--hierarchical-allgather": ("HIERARCHICAL_ALLGATHER", "1"),
    "--no-hierarchical-allgather": ("HIERARCHICAL_ALLGATHER", "0"),
    "--torus-allreduce": ("TORUS_ALLREDUCE", "1"),
    "--no-torus-allreduce": ("TORUS_ALLREDUCE", "0"),
    "--autotune": ("AUTOTUNE", "1"),
    "--no-autotune": ("AUTOTUNE", "0"),
    "--autotune-log-file a.txt": ("AUTOTUNE_LOG", "a.txt"),
    "--autotune-warmup-samples 5": ("AUTOTUNE_WARMUP_SAMPLES", "5"),
    "--autotune-steps-per-sample 20": ("AUTOTUNE_STEPS_PER_SAMPLE", "20"),
    "--autotune-bayes-opt-max-samples 50": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "50"),
    "--autotune-gaussian-process-noise 0.9": ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.9"),
    "--timeline-filename t.json": ("TIMELINE", "t.json"),
    "--timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "0"),
    "--stall-check": ("STALL_CHECK_DISABLE", "0"),
    "--no-stall-check": ("STALL_CHECK_DISABLE", "1"),
    "--stall-check-warning-time-seconds 120": ("STALL_CHECK_TIME_SECONDS", "120"),
    "--stall-check-shutdown-time-seconds 0": ("STALL_SHUTDOWN_TIME_SECONDS", "0"),
    "--mpi-threads-disable": ("MPI_THREADS_DISABLE", "1"),
    "--no-mpi-threads-disable": ("MPI_THREADS_DISABLE", "0"),
    "--num-nccl-streams 2": ("NUM_NCCL_STREAMS", "2"),
    "--thread-affinity 1": ("THREAD_AFFINITY", "1"),
    "--ccl-bgt-affinity 1": ("THREAD_AFFINITY", "1"),
    "--gloo-timeout-seconds 60": ("GLOO_TIMEOUT_SECONDS", "60"),
    "--log-level INFO": ("LOG_LEVEL", "INFO"),
    "--log-with-timestamp": ("LOG_HIDE_TIME", "0"),
    "--no-log-hide-timestamp": ("LOG_HIDE_TIME", "0"),
    "--log-without-timestamp": ("LOG_HIDE_TIME", "1"),
    "--log-hide-timestamp": ("LOG_HIDE_TIME", "1"),
}
"""What horovodrun 0.28.1 sets."""


def spec_of(line, environ=None):
    return job_spec(parse(f"{line} python train.py".split()), environ or {})[0]


@pytest.mark.parametrize("flag", VARIABLES)
def test_a_tuning_flag_sets_its_variable_and_makes_the_job_one_of_horovod(flag):
    name, value = VARIABLES[flag]
    spec = spec_of(f"-np 2 {flag}")
    assert spec.env == {f"HOROVOD_{name}": value}
    assert spec.horovod


FILE = """
controller: gloo
params:
  fusion_threshold_mb: 16
  cycle_time_ms: 2.5
  cache_capacity: 512
  hierarchical_allreduce: false
  hierarchical_allgather: true
  torus_allreduce: true
autotune:
  enabled: true
  log_file: 'log.txt'
  warmup_samples: 1
  steps_per_sample: 2
  bayes_opt_max_samples: 3
  gaussian_process_noise: 0.4
timeline:
  filename: "time.json"
  mark_cycles: yes
stall_check:
  enabled: false
  warning_time_seconds: 5
  shutdown_time_seconds: 6
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 7
  ccl_bgt_affinity: 8
  gloo_timeout_seconds: 9
logging:
  level: INFO
  hide_timestamp: true
"""
"""All keys that horovodrun's files have, and those of its tests."""
VALUES = (
    "FUSION_THRESHOLD=16777216 CYCLE_TIME=2.5 CACHE_CAPACITY=512 HIERARCHICAL_ALLREDUCE=0 HIERARCHICAL_ALLGATHER=1 TORUS_ALLREDUCE=1 "
    "AUTOTUNE=1 AUTOTUNE_LOG=log.txt AUTOTUNE_WARMUP_SAMPLES=1 AUTOTUNE_STEPS_PER_SAMPLE=2 AUTOTUNE_BAYES_OPT_MAX_SAMPLES=3 "
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE=0.4 TIMELINE=time.json TIMELINE_MARK_CYCLES=1 STALL_CHECK_DISABLE=1 STALL_CHECK_TIME_SECONDS=5 "
    "STALL_SHUTDOWN_TIME_SECONDS=6 MPI_THREADS_DISABLE=1 NUM_NCCL_STREAMS=7 THREAD_AFFINITY=8 GLOO_TIMEOUT_SECONDS=9 LOG_LEVEL=INFO "
    "LOG_HIDE_TIME=1"
)


def test_a_file_of_horovodrun_sets_the_same_and_the_command_line_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "horovod.yaml").write_text(FILE)
    words = [
        "--config-file",
        "horovod.yaml",
        "--cache-capacity",
        "1",
        "--stall-check",
        "-np",
        "2",
        "python",
        "train.py",
    ]
    spec, _ = job_spec(parse([*words[:2], *words[-4:]], environ={}), {})
    assert spec.env == {
        f"HOROVOD_{name}": value for name, value in (word.split("=") for word in VALUES.split())
    }
    assert (spec.horovod, spec.np, spec.mpi) == (True, 2, None)
    other, _ = job_spec(parse(words, environ={}), {})
    assert other.env == {**spec.env, "HOROVOD_CACHE_CAPACITY": "1", "HOROVOD_STALL_CHECK_DISABLE": "0"}


def test_sections_without_anything_set_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "horovod.yaml").write_text("params:\n  # cycle_time_ms: 3\nautotune:\n  enabled:\n")
    assert set(parse(["--config-file", "horovod.yaml", "true"], environ={}).given) == {"config_file"}


def test_all_tuning_flags_are_known():
    tested = {line.split()[0] for line in VARIABLES} - {"--ccl-bgt-affinity"}
    flags = {flag for option in HOROVOD.options for flag in (*option.flags, *option.opposites)}
    assert flags - tested == {
        f"--{no}{name}" for no in ("", "no-") for name in ("horovod", "tcp", "disable-cache")
    } | {"--no-log-with-timestamp"}


def test_tcp_is_a_variable_of_nccl():
    assert spec_of("-np 2 --tcp").env == {"NCCL_IB_DISABLE": "1"}


def test_what_is_not_said_stays_as_it_is_in_the_environment_and_x_wins():
    environ = {"HOROVOD_CYCLE_TIME": "7", "HOROVOD_AUTOTUNE": "1", "HOROVOD_LOG_LEVEL": "INFO"}
    spec = spec_of("--no-autotune --log-level DEBUG -x HOROVOD_LOG_LEVEL=TRACE", environ)
    assert spec.env == {
        "HOROVOD_CYCLE_TIME": "7",
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_LOG_LEVEL": "TRACE",
    }


@pytest.mark.parametrize(
    ("line", "is_horovod"),
    [
        ("-np 2 --autotune --no-horovod", False),
        ("--min-np 2 -H a:2,b:2 --autotune", False),
        ("-np 2 --disable-cache", False),
        ("-np 2 --horovod", True),
    ],
)
def test_when_the_rendezvous_is_open_to_horovods_workers(line, is_horovod):
    assert spec_of(line).horovod is is_horovod


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--cycle-time-ms -1", "--cycle-time-ms: -1 is less than 0"),
        ("--cycle-time-ms nan", "--cycle-time-ms: nan is less than 0, or no number"),
        ("--fusion-threshold-mb -1", "--fusion-threshold-mb: -1 is not between 0 and"),
        ("--autotune-gaussian-process-noise 1.5", ": 1.5 is not between 0 and 1"),
        ("--log-level LOUD", "--log-level: invalid choice: 'LOUD' (choose from TRACE, DEBUG, "),
        ("--gloo-timeout-seconds soon", "'soon' is not a whole number"),
    ],
)
def test_a_wrong_value_is_refused(line, text):
    with pytest.raises(BadUsage) as caught:
        spec_of(f"-np 2 {line}")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 4 -H localhost:4", {"np": 4}),
        ("-np 16 -H server1:4,server2:4,server3:4,server4:4", {"np": 16}),
        ("-np 6 -hostfile hosts --ssh-port 12345 --gloo", {"np": 6}),
        ("-np 8 --min-np 4 --max-np 12 --host-discovery-script ./discover.sh --slots 4", {"np": 8, "slots_per_host": 4}),
        ("-np 4 --network-interface eth0 --start-timeout 60 --verbose --disable-cache", {"start_timeout": 60.0}),
        ("-np 4 -H localhost:4 --timeline-filename /tmp/timeline.json --timeline-mark-cycles", {"horovod": True}),
        ("-np 4 --autotune --autotune-log-file /tmp/autotune_log.csv", {"horovod": True}),
        ("-np 4 --mpi --mpi-args=--oversubscribe --tcp", {"np": 4}),
        ("-np 2 -prefix-timestamp --output-filename out --no-stall-check", {"np": 2}),
    ],
)  # fmt: skip
def test_a_line_of_its_documentation_is_taken_as_it_is(line, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    spec = spec_of(line)
    assert {name: getattr(spec, name) for name in expected} == expected
    assert spec.command == ("python", "train.py")
