"""What workers on this machine find where the job has other hosts: no more than those."""

from hvlaunch.hosts.local import host_environ, only_local
from hvlaunch.job import ElasticOptions, Host, JobSpec

HERE = {
    "HOME": "/root",
    "TMPDIR": "/t",
    "CUDA_VISIBLE_DEVICES": "0",
    "PATH": "/bin",
    "MINE": "1",
    "MODULEPATH": "/m",
}


def test_workers_here_get_no_more_variables_than_on_other_hosts():
    assert host_environ(HERE, {"PATH": "/elsewhere"}) == {
        "HOME": "/root",
        "TMPDIR": "/t",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
    }


def test_a_job_is_only_local_if_no_host_may_ever_be_another():
    def is_only_local(*names, **fields):
        spec = JobSpec(command=("true",), hosts=tuple(map(Host, names)), cwd="/", **fields)
        return only_local(spec, is_local=lambda host: host.name in ("localhost", "me"))

    assert is_only_local("localhost", "me")
    assert not is_only_local("localhost", "b")
    assert is_only_local("localhost", elastic=ElasticOptions(min_np=1))
    assert not is_only_local(elastic=ElasticOptions(min_np=1, discovery_script="./hosts.sh"))
