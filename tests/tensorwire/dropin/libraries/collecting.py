"""A program for TorchRL, which collects frames of an environment that another process runs.

The environment counts its steps, and needs no other package.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict, TensorDictBase
from torch.distributed import rpc
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase


class Counting(EnvBase):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        return TensorDict({"count": torch.zeros(1)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        count = tensordict["count"] + 1
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"count": count, "reward": count, "done": done}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


def main(port: str) -> None:
    collector = RPCCollector(
        [Counting],
        None,
        total_frames=40,
        frames_per_batch=20,
        launcher="mp",
        tcp_port=port,
    )
    transport = type(rpc._get_current_rpc_agent().transport).__name__
    frames = sum(batch.numel() for batch in collector)
    collector.shutdown()
    print(f"{frames} frames over {transport.removesuffix('Transport').upper()}")


if __name__ == "__main__":
    main(sys.argv[1])
