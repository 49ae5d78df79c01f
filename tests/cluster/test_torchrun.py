"""torchrun with hvlaunch's rendezvous: real agents on real hosts, real Gloo."""

from pathlib import Path

import pytest

from tests.cluster.torchrun_agents import Agent, rendezvous, tell_to_stop, wait_for_round
from tests.testhosts.hosts import TestHosts

HOME = "/run/home/root"
TOKEN_FILE = f"token_file={HOME}/token"


@pytest.mark.timeout(400)
def test_a_killed_worker_a_lost_node_of_rank_0_and_a_spare(cluster: TestHosts, tmp_path: Path) -> None:
    with rendezvous(cluster, tmp_path / "token") as options:
        everyone = ["--nnodes=2", "--max-restarts=3", *options, f"--rdzv-conf={TOKEN_FILE}"]
        agents = [Agent(host, everyone) for host in cluster]
        wait_for_round(agents, 1)

        def with_rank(rank: int) -> Agent:
            newest = {agent: agent.reports()[-1] for agent in agents if agent.reports() and agent.host.pid}
            (found,) = [agent for agent, seen in newest.items() if seen["rank"] == rank]
            return found

        victim = with_rank(1)
        victim.host.run(["kill", "-9", str(victim.worker())], check=True)
        wait_for_round(agents, 2)
        lost, survivor = with_rank(0), with_rank(1)
        lost.host.kill()
        wait_for_round(agents, 3)
        assert survivor.reports()[-1]["rank"] == 0
        tell_to_stop(cluster)
        codes = {agent.host.name: agent.code() for agent in agents if agent is not lost}
        assert set(codes.values()) == {0}, {agent.host.name: agent.output for agent in agents}
        assert sum(not agent.reports() for agent in agents) == 1, "one was a spare to the end"
        assert all("AttributeError" not in agent.output for agent in agents)


def test_a_wrong_token(cluster: TestHosts, tmp_path: Path) -> None:
    with rendezvous(cluster, tmp_path / "token") as options:
        agent = Agent(
            cluster["a"],
            options,
            {"HVLAUNCH_TOKEN": "another-token", "HVLAUNCH_RENDEZVOUS_CERT": f"{HOME}/token.crt"},
        )
        assert agent.code() == 1
        assert "check that HVLAUNCH_TOKEN is the token of this job" in agent.output
        assert "another-token" not in agent.output
