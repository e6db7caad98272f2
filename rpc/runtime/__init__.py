"""What Python, torch and Linux oblige every worker to do: clocks, threads, event loop, forks.

Knows nothing of calls.
"""
