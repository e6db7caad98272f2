"""Distributed traces: what every worker did for some calls, in one picture."""

from rpc.observe.tracing import MAX_RECORDS, RPC_EXTENSION, Trace, Tracing, trace

__all__ = ["MAX_RECORDS", "RPC_EXTENSION", "Trace", "Tracing", "trace"]
