"""Memory for rows and the index that finds them by id.

``memory`` grows without copying, in the host's memory; ``device_memory`` is on an accelerator;
``index`` maps ids to places. Tables of servers and caches of trainers are built on it.
"""
