"""A trainer or reader: ``cluster`` is what a user holds, ``session`` talks to the servers.

``splitting`` divides ids and gradients among shards, ``table`` and ``dense`` are handles of what
the servers keep, ``exchange`` holds what goes out and comes back.
"""
