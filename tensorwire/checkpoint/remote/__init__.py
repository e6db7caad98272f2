"""Chains of versions for readers that do not see the folder: over the network, or in object stores.

``server`` gives versions to whoever has the reader key, ``client`` asks it; ``handshake`` and
``messages`` are their protocol, without I/O. ``objects`` copies a chain into an object store and
reads it there. ``mirror`` makes a source for followers of either.
"""
