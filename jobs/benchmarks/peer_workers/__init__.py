"""One engine a process, which `jobs/benchmarks/peers.py` starts in the engine's own environment.

A worker imports its engine, and of this repository `contract` alone, which needs nothing but Python.
"""
