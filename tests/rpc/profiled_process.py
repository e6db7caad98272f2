"""A process whose calls outlive the profiles they were made in."""

import torch
from torch.profiler import ProfilerActivity

import rpc
from rpc.testing import as_worker, local_group
from tests.rpc.gates import gate, wait_at_the_gate

PROFILES = 10
CALLS = 1000

if __name__ == "__main__":
    with local_group("worker0", "worker1") as agents, as_worker(agents[0]):
        for _ in range(PROFILES):
            gate.clear()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
                futures = [rpc.rpc_async("worker1", wait_at_the_gate) for _ in range(CALLS)]
            used_again = [torch.zeros(13) for _ in range(CALLS)]
            gate.set()
            for future in futures:
                future.wait()
            del used_again
