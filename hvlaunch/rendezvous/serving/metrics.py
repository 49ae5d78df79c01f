"""What the server tells about itself: its health in JSON, its numbers as Prometheus' text format has them."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hvlaunch.rendezvous.serving.http import Answer
from hvlaunch.rendezvous.serving.traffic import Stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["health", "prometheus"]

_GAUGES = {
    "connections": "Open connections.",
    "keys": "Keys that are set.",
    "bytes": "Bytes held, names included.",
    "strangers": "Open connections that have not shown the token.",
    "waiting": "Long polls and watches not yet answered.",
}
_COUNTERS = {
    "dropped": "Connections ended because the client was too slow, idle, or took no answers.",
    "turned_away": "Connections ended because there were too many, of strangers above all.",
    "faults": "Exceptions that nobody caught; each is a defect of the server.",
}


def health(stats: Stats) -> Answer:
    """It serves, and how much."""
    body = json.dumps({"status": "ok", **stats._asdict()}) + "\n"
    return Answer(200, body.encode(), b"Content-Type: application/json\r\n")


def prometheus(stats: Stats, answers: Mapping[int, int]) -> Answer:
    """The numbers, with the answers by HTTP status. 501 where prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 (100 ms, and only for who asks)
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 (as above)
        from prometheus_client.registry import Collector  # noqa: PLC0415 (as above)
    except ImportError:
        return Answer(501, b"the server has no prometheus-client; pip install prometheus-client\n")

    class Numbers(Collector):
        def collect(self) -> "Iterator[Metric]":
            return _families(stats, answers)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers())
    content_type = f"Content-Type: {CONTENT_TYPE_LATEST}\r\n".encode("ascii")
    return Answer(200, generate_latest(registry), content_type)


def _families(stats: Stats, answers: Mapping[int, int]) -> "Iterator[Metric]":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 (as above)

    values = {**stats._asdict(), "bytes": stats.size}
    requests = CounterMetricFamily(_name("requests"), "Answers by HTTP status.", labels=["status"])
    for status, count in sorted(answers.items()):
        requests.add_metric([str(status)], count)
    yield requests
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(_name(name), text, value=values[name])
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(_name(name), text, value=values[name])


def _name(name: str) -> str:
    return f"hvlaunch_rendezvous_{name}"
