"""A load generator for OpenAI-compatible servers, and the statistics that make its numbers worth reading.

`load.py` says what a load is, `prompts.py` draws it before the first request leaves (its times as experiments
do, with `sched.arrivals`, or as a trace of `rayk.traces` has them), `client.py` sends one request and stamps
its tokens, `generator.py` keeps the schedule and watches its own lag, `statistics.py` estimates with
intervals, `summary.py` turns the requests of a load into numbers, `verdict.py` judges those (VALID, NOISY,
INVALID), `run.py` runs several loads and writes the tables. Knows of servers only what HTTP tells.
"""

from rayk.bench.load import Load
from rayk.bench.run import run_bench
from rayk.types.slo import Slo, parse_slo

__all__ = ["Load", "Slo", "parse_slo", "run_bench"]
