"""Teach a tiny model a little English, so that what it writes can be foreseen.

    rayk checkpoint llama checkpoints/llama-tiny
    python jobs/draft_taught.py --model checkpoints/llama-tiny --out checkpoints/llama-taught [--minutes 3]

The weights that `rayk checkpoint` draws make every token depend on all tokens before it, so that wrong KV
shows, and no small head foresees such text. What a model writes that learned from pages repeats itself, as
that of real models does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # works without an install

from rayk.cli.guard import run_guarded
from rayk.oracle.checkpoint import MARKER
from rayk.oracle.files import checkpoint_hash, replaced_folder
from rayk.oracle.quiet import no_progress_bars
from rayk.types.errors import UserError

ROW_TOKENS = 128
"""Tokens of a row of a batch."""
BATCH = 8
NOTES = "taught.json"
"""The file in a finished folder that says from what it was made."""
LEARNING_RATE = 2e-3
NUM_TOLD = 50
"""Updates between two lines about the loss."""


def teach(model: torch.nn.Module, token_ids: Tensor, minutes: float, updates: int, seed: int) -> list[float]:
    """Train on random rows of a text [N]; returns the loss of each update, in nats a token.

    minutes: of CPU time, at most.
    """
    draw, losses, began = torch.Generator().manual_seed(seed), list[float](), time.process_time()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    while len(losses) < updates and time.process_time() - began < 60 * minutes:
        starts = torch.randint(len(token_ids) - ROW_TOKENS + 1, (BATCH,), generator=draw)
        rows = token_ids[starts[:, None] + torch.arange(ROW_TOKENS)]
        loss = model(rows, labels=rows, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        if len(losses) % NUM_TOLD == 0:
            recent = sum(losses[-NUM_TOLD:]) / NUM_TOLD
            print(f"update {len(losses)}: {recent:.3f} nats a token", file=sys.stderr, flush=True)
    model.eval()
    return losses


def taught(
    folder: Path, target: Path, pages: Sequence[Path], *, minutes: float, updates: int, seed: int
) -> list[float]:
    """Write a copy of a checkpoint that learned from pages of text; returns the loss of each update.

    Raises UserError if the pages hold no row of text or the folder holds something else.
    """
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    token_ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(token_ids) < ROW_TOKENS:
        raise UserError(f"{len(token_ids)} tokens of text", where="--pages", mend=f"{ROW_TOKENS} or more")
    with replaced_folder(target, marker=NOTES) as scratch, no_progress_bars():
        losses = teach(model, token_ids, minutes, updates, seed)
        shutil.copytree(folder, scratch, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARKER))
        model.save_pretrained(scratch)
        notes = {
            "model": checkpoint_hash(folder),
            "num_tokens": len(token_ids),
            "seed": seed,
            "losses": losses,
        }
        (scratch / NOTES).write_text(json.dumps(notes), encoding="utf-8")
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the tiny checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--pages", type=Path, nargs="+", help="text to learn from [default: docs/*.md]")
    parser.add_argument("--minutes", type=float, default=3.0, help="of CPU, at most [default: 3]")
    parser.add_argument("--updates", type=int, default=2000, help="of the weights, at most [default: 2000]")
    parser.add_argument("--seed", type=int, default=0, help="of the rows that are drawn [default: 0]")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    pages = asked.pages or sorted(ROOT.glob("docs/*.md"))
    began = time.process_time()
    losses = taught(
        asked.model, asked.out, pages, minutes=asked.minutes, updates=asked.updates, seed=asked.seed
    )
    few = max(1, min(NUM_TOLD, len(losses) // 4))
    print(
        f"{asked.out}: {len(losses)} updates in {(time.process_time() - began) / 60:.1f} minutes of CPU, "
        f"{sum(losses[:few]) / few:.3f} to {sum(losses[-few:]) / few:.3f} nats a token"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
