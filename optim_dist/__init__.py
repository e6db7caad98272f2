"""Optimizing parameters that live on several workers."""

from optim_dist.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
