"""A server process: carries out what ``decisions`` decide, on the state that ``storage`` keeps.

``host`` is what others call; ``node`` is one server's part in one cluster; ``shard`` one shard
at one server; ``lane`` has one thread at a time work on a shard; ``state`` is what a shard keeps;
``coordinating`` runs the coordinator; ``copying`` sends shards and rows elsewhere; ``writing``
writes snapshots and reads them.
"""
