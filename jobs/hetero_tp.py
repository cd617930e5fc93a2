"""The heterogeneous-TP experiment as a job; the same code as `rayk run`.

    ray job submit --working-dir . -- python jobs/hetero_tp.py --out /absolute/path
    python jobs/hetero_tp.py --set prompts.random.count=3

The exit status is the run's. Results written below a job's working directory stay in Ray's copy of it:
give `--out` an absolute path. Options are those of `rayk run`, the spec being `--spec`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from rayk.cli.guard import run_guarded  # noqa: E402
from rayk.cli.run import run_spec  # noqa: E402

SPEC = Path(__file__).with_suffix(".yaml")
TINY = Path("checkpoints/qwen3-tiny")


def run_job(description: str, spec: Path, write_checkpoints: Callable[[], None]) -> int:
    """Run an experiment; returns the exit code of `rayk run`.

    A job's working directory holds tracked files only: `write_checkpoints` makes the models of `spec` where
    they are missing or outdated.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", type=Path, default=spec, help="experiment, YAML (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/<name>-<time>)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--address", help="Ray cluster (default: RAY_ADDRESS, else a local one)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--strict", action="store_true", help="UNSUPPORTED cells fail the run")
    options = parser.parse_args()
    if options.spec == spec:
        write_checkpoints()
    return run_guarded(
        lambda: run_spec(
            options.spec,
            options.out,
            overrides=options.overrides,
            address=options.address,
            resume=options.resume,
            strict=options.strict,
        )
    )


def write_models(folder: Path, models: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Tiny checkpoints in `folder`, by name: the family and what is changed in its config. What is there is
    kept."""
    from rayk.oracle.checkpoint import write_checkpoint

    for name, (family, overrides) in models.items():
        print(f"checkpoint {folder / name}", file=sys.stderr)
        write_checkpoint(family, folder / name, overrides=dict(overrides))


def write_tiny_checkpoint() -> None:
    """The spec's model."""
    write_models(TINY.parent, {TINY.name: ("qwen3", {})})


if __name__ == "__main__":
    sys.exit(run_job("Run the heterogeneous-TP experiment.", SPEC, write_tiny_checkpoint))
