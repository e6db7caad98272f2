"""Looking at a job while it runs: what its workers do, and which of them stand still.

Rooms: ``views`` is what can be seen, as data; ``hub`` asks the workers of one machine;
``machine`` reads what the kernel says of a process; ``exchange`` brings the machines of a job
together; ``standstill`` decides who stands still and why; ``jobs`` finds the jobs of this user;
``terminal`` shows a job as text, ``dashboard`` as a page; ``experiment_log`` writes a cluster's
figures to TensorBoard.
"""

from tensorwire.watching.experiment_log import ClusterLog
from tensorwire.watching.jobs import JobNotFoundError, RunningJob, find_job, running_jobs
from tensorwire.watching.views import JobView, NodeView, ProcessView, WorkerView

__all__ = [
    "ClusterLog",
    "JobNotFoundError",
    "JobView",
    "NodeView",
    "ProcessView",
    "RunningJob",
    "WorkerView",
    "find_job",
    "running_jobs",
]
