"""Decisions of the parameter server, without I/O: an event in, a list of effects out.

No sockets, threads, locks, clocks or tensors here. ``clock`` orders the pushes of one shard;
``reads`` says which pulls may be answered; ``replication`` keeps a backup in step; ``views``
says which server keeps what; ``coordination`` changes that; ``unacknowledged`` is the
trainer's side. ``tests/tensorwire/parameter_server/game`` plays all of them together.
"""
