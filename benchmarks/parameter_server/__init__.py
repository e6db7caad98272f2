"""Compares ways to train what a server keeps: time of a step, and memory. See ``__main__``."""
