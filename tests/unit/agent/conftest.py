"""Agents and marked processes that don't outlive their test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.agent.harness import AgentProcess, Hunt


@pytest.fixture
def launch() -> Iterator[Callable[..., AgentProcess]]:
    """Starts agents; takes what AgentProcess takes."""
    started: list[AgentProcess] = []

    def start(**options: Any) -> AgentProcess:
        started.append(AgentProcess(**options))
        return started[-1]

    yield start
    for agent in started:
        agent.end()


@pytest.fixture
def agent(launch: Callable[..., AgentProcess]) -> AgentProcess:
    """An agent that has been greeted."""
    one = launch()
    one.hello()
    return one


@pytest.fixture
def hunt() -> Iterator[Hunt]:
    one = Hunt()
    yield one
    one.end()
