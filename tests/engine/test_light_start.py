"""What a rank imports before its first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models.tiny import write_checkpoint

SCRIPT = """\
import sys
from pathlib import Path
from rayk.engine.rank import EngineRank
from rayk.models.families import load_config
from rayk.models.unused import note_unused
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig

(folder,) = sys.argv[1:]
assert note_unused(folder, load_config(Path(folder))) == ""
EngineRank(EngineConfig(model=folder, num_blocks=8, max_seqs=2), LocalComm())
print("torch._dynamo" in sys.modules)
"""


def test_recording_decode_steps_leaves_torchs_compiler_alone(tmp_path: Path) -> None:
    """Its import takes as long as all of torch's, and nothing is compiled here."""
    write_checkpoint(tmp_path, "qwen3")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stdout + done.stderr
