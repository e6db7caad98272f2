"""Published versions of a cluster's state, read by processes that are not in its group.

``rows`` keeps a table at its newest version and at those that readers still hold; ``content`` puts
the tables and dense parameters of a version together; ``model`` is what a user holds.
"""
