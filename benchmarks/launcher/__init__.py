"""Seconds that jobs of rpcrun take to start, to return and to end.

``python -m benchmarks.launcher training|ends|returns|beside-torchrun``.
"""
