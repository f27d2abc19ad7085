"""Benchmarks: every figure is a ratio of two things measured in one run on one machine. `python -m bench --list`."""
