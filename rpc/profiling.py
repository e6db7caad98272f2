"""Profiles of remote calls: what ran on other workers for the calls of a block."""

from rpc.observe.profiling import profile

__all__ = ["profile"]
