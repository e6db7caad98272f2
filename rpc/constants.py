"""Defaults and sentinels of the public interface, named as the original names them."""

from __future__ import annotations

from typing import Final

DEFAULT_RPC_TIMEOUT_SEC: Final = 60.0
"""Seconds a call may take when neither it nor the options say otherwise."""

UNSET_RPC_TIMEOUT: Final = -1.0
"""Passed as a timeout: use the default."""

DEFAULT_SHUTDOWN_TIMEOUT: Final = 0
"""Passed to ``shutdown``: wait without limit."""

DEFAULT_NUM_WORKER_THREADS: Final = 16
"""Handlers that run at the same time, besides those that wait."""

DEFAULT_INIT_METHOD: Final = "env://"
"""Finds the store by the environment variables that torchrun sets."""

DEFAULT_BRING_UP_TIMEOUT_SEC: Final = 300.0
"""Seconds to wait for the other workers when a group forms."""

DEFAULT_LIVENESS_TIMEOUT_SEC: Final = 5.0
"""Seconds without a sign of life after which a worker is declared lost."""

DEFAULT_LINK_RESUME_TIMEOUT_SEC: Final = 5.0
"""Seconds within which a connection that broke is opened again."""

DEFAULT_SHARED_MEMORY_BYTES: Final = 1 << 30
"""Bound on the shared memory that a worker holds for tensors sent to others on its host."""

DEFAULT_MAX_BYTES_IN_FLIGHT: Final = 32 << 20
"""Bound on the requests to one worker that were not replied to."""

DEFAULT_BUSY_POLL_SEC: Final = 95e-6
"""Seconds, on average, that a thread looks out for a message over TENSORWIRE before it sleeps."""

MAX_RANK: Final = 2**15 - 1
"""The highest rank, as in the original: what a worker numbers begins with its rank."""
