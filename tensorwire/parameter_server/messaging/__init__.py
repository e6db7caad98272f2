"""The messages between trainers and servers, and calls that carry them.

``messages`` are plain data; ``settings`` keeps a cluster's settings and view in the group's
store; ``calling`` calls a server and says if it is lost.
``client`` and ``server`` meet here and nowhere else.
"""
