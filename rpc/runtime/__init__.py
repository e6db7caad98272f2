"""The duties that Python, torch and Linux give every worker: clocks, threads, event loop, forks.

Knows nothing of calls.
"""
