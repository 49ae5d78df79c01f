"""What a job around hvlaunch says of hvlaunch's own process is not passed off as a worker's place."""

from hvlaunch.hosts.local import without_outer_rank
from hvlaunch.mpi import ALL_NAMES

OF_THE_WHOLE_JOB = {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "OMPI_MCA_btl", "LSB_JOBID", "PATH"}


def test_ranks_of_the_outer_job_are_removed():
    ranks = {*ALL_NAMES, "SLURM_NODEID", "PMI_FD", "PMIX_NAMESPACE"} - OF_THE_WHOLE_JOB
    assert without_outer_rank(dict.fromkeys(ranks, "0")) == {}


def test_variables_of_the_outer_jobs_rank_are_removed():
    outer = ("HVLAUNCH_ELASTIC", "HVLAUNCH_WORKER_PORTS", "HOROVOD_ELASTIC", "TORCHELASTIC_USE_AGENT_STORE")
    assert without_outer_rank(dict.fromkeys(outer, "1")) == {}


def test_variables_that_hold_for_all_processes_stay():
    environ = dict.fromkeys(OF_THE_WHOLE_JOB, "x") | {"UPMI_RANK": "x", "SLURM_PROCIDS": "x"}
    assert without_outer_rank(environ) == environ
