"""Optimizing parameters that live on several workers."""

from optim_dist.clipping import clip_grad_norm_
from optim_dist.optimizer import DistributedOptimizer
from optim_dist.schedulers import lr_scheduler

__all__ = ["DistributedOptimizer", "clip_grad_norm_", "lr_scheduler"]
