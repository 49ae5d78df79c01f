from hvlaunch.api.errors import CallNotPickled as CallNotPickled
from hvlaunch.api.errors import JobFailed as JobFailed
from hvlaunch.api.errors import JobStopped as JobStopped
from hvlaunch.api.errors import ResultLost as ResultLost
from hvlaunch.api.errors import ResultNotRead as ResultNotRead
from hvlaunch.api.errors import WorkerFailed as WorkerFailed
from hvlaunch.api.job import Job as Job
from hvlaunch.api.job import Line as Line
from hvlaunch.api.job import attach as attach
from hvlaunch.api.job import jobs as jobs
from hvlaunch.api.launcher import Cluster as Cluster
from hvlaunch.api.launcher import Launcher as Launcher
from hvlaunch.api.launcher import run as run

__all__ = [
    "CallNotPickled",
    "Cluster",
    "Job",
    "JobFailed",
    "JobStopped",
    "Launcher",
    "Line",
    "ResultLost",
    "ResultNotRead",
    "WorkerFailed",
    "__version__",
    "attach",
    "jobs",
    "run",
]

__version__: str
