"""Ray settings that must stand in the environment before `import ray` (it reads them once)."""

from __future__ import annotations

import os

RAY_DEFAULTS = {
    # A local `ray.init` would else turn token authentication on for every later cluster of this user.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "1000",
    # Under `uv run`, Ray would start workers through uv inside the uploaded working directory.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # GPU-less actors must not see every GPU, and today's default becomes tomorrow's warning.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Applied where the user has not set them."""


def prepare_environment() -> None:
    """Set the defaults. Call before the first `import ray`."""
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
