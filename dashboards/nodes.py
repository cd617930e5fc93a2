"""Keep a file with the metric endpoints of a Ray cluster's nodes, as Prometheus' file_sd reads it.

`python -m dashboards.nodes FILE [ADDRESS]`: a process of its own, because Ray ends processes whose cluster is
gone. Clusters without a dashboard, such as that of a local `rayk run`, keep no such file themselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rayk.actors.environment import wanted_address
from rayk.types.errors import DeviceError

PERIOD_S = 3.0


def write_targets(path: Path, targets: list[str]) -> None:
    """Replace the file whole: Prometheus may read it at any moment."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([{"targets": sorted(targets), "labels": {"job": "ray"}}]))
    new.replace(path)


def main(arguments: list[str]) -> int:
    """Until whoever started this is gone, or the cluster. 2: there is none."""
    path, address = Path(arguments[0]), wanted_address(arguments[1] if len(arguments) > 1 else None)
    parent = os.getppid()
    try:
        return _watch(path, address, parent)
    except DeviceError as error:
        print(f"{error.problem}; {error.mend}", file=sys.stderr)
        return 2
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        print(f"no Ray cluster: {next(iter(str(error).splitlines()), '')}", file=sys.stderr)
        return 2


def _watch(path: Path, address: str | None, parent: int) -> int:
    import ray

    from rayk.actors.ray_private import joining

    with joining(address or "auto") as (found, _):
        ray.init(address=found, log_to_driver=False, configure_logging=False)
        while os.getppid() == parent:
            nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            write_targets(path, [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in nodes])
            time.sleep(PERIOD_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
