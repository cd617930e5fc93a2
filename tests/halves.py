"""`make test`: the tests of the marker `ray` beside all others, in two processes.

Those of a Ray cluster mostly wait for processes to start and end. What they print follows at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

QUICK = "not slow and not gpu"
NO_TESTS = 5
"""pytest's exit status where an expression selects nothing."""


def halves(arguments: list[str]) -> int:
    """Run pytest twice at once; the worse of both exit statuses."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile() as printed:
        beside = subprocess.Popen([*command, "-m", f"{QUICK} and ray"], stdout=printed, stderr=printed)
        try:
            statuses = [subprocess.run([*command, "-m", f"{QUICK} and not ray"], check=False).returncode]
            statuses.append(beside.wait())
        except KeyboardInterrupt:  # pytest got it as well, and ends its cluster
            beside.wait()
            raise
        printed.seek(0)
        sys.stdout.write(printed.read().decode(errors="replace"))
        sys.stdout.flush()
    return max((abs(status) for status in statuses if status != NO_TESTS), default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(halves(sys.argv[1:]))
