"""Compares TensorWire with ``torch.distributed.rpc`` on one machine, in one run.

Run ``python -m benchmarks``. Every column of the table is a group of processes;
all groups are alive at the same time, and the measurement goes round them in short
slices, so that a machine that changes its mood does so for all. While one group is
measured the others are stopped, because torch's idle processes occupy a core each.
All are started afresh several times.

``workloads`` says what is measured, ``bindings`` against which library,
``member`` is one process, ``group`` a column's processes, ``rounds`` the order
of things, ``summary`` and ``report`` what becomes of the numbers.
"""
