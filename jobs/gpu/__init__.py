"""The stages of jobs/gpu_day.py, and the table of rows that they fill."""

import sys
from pathlib import Path

# Benchmarks import their parts as their neighbours.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
