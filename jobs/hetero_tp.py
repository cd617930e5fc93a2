"""The heterogeneous-TP experiment as a job; the same code as `rayk run`.

    ray job submit --working-dir . -- python jobs/hetero_tp.py --out /absolute/path
    python jobs/hetero_tp.py --set prompts.random.count=3
    python jobs/hetero_tp.py --spec jobs/hybrid.yaml

The exit status is the run's. Results written below a job's working directory stay in Ray's copy of it:
give `--out` an absolute path. Options are those of `rayk run`, the spec being `--spec`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from rayk.cli.main import app

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", default=str(Path(__file__).with_suffix(".yaml")))
    own, others = parser.parse_known_args()
    app(["run", own.spec, *others])
