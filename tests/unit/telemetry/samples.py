"""A host's sample."""

from typing import Any

__all__ = ["SAMPLE_OF_A_HOST"]

SAMPLE_OF_A_HOST: dict[str, Any] = {
    "cores": 8,
    "cpu": 1.5,
    "load": 2.0,
    "memory_used": 1 << 30,
    "memory_total": 1 << 34,
    "network_in": 10.0,
    "network_out": 0,
    "disk_read": 0.0,
    "disk_write": 1.0,
    "free": {"cwd": [1, 2]},
    "workers": [
        {
            "rank": 7,
            "pid": 70,
            "processes": 2,
            "cpu": 1.0,
            "cpu_time": 12.5,
            "memory": 1 << 20,
            "state": "S",
            "threads": 3,
            "busiest": 101,
            "waits_in": "pipe_read",
            "io": 5,
            "gpus": [0],
        }
    ],
    "gpus": [
        {
            "index": 0,
            "name": "NVIDIA H100",
            "utilization": 0.5,
            "memory_used": 1,
            "memory_total": 2,
            "power": 300.5,
            "energy_joules": 9000.5,
            "temperature": 60,
            "throttled": ["power cap"],
            "ecc_errors": 0,
            "xids": [31],
            "pids": [70],
        }
    ],
    "problems": [],
}
