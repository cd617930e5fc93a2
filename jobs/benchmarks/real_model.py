"""A real model through rayk: what pairs of engines answered and moved, and what formats cost in quality.

    make real [ARGS='--record']
    python jobs/benchmarks/real_model.py [--specs jobs/real.yaml ...] [--runs DIR ...] [--check] [--record]

The cells are those of experiment files, run here or read from folders of runs (--runs). A cell that did
not end as it should fails the script, as does one whose prefix cache or host tier, if it has one, served
no token.

Quality is rayk's own: an engine computes the prompts, and the distribution that it gives every next
token, over the whole vocabulary, is compared with transformers' in float32. Told are the KL divergence
KL(transformers || rayk) in nats, by token on average and at most, the share of tokens whose best
successor is the same, and the perplexity of the text. The weights are equal on both sides.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import ROOT, Page, run
from rayk.engine.build import ThreadEngine
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

MODEL = ROOT / "checkpoints" / "smollm2-135m"
PROMPT_FILES = (ROOT / "jobs" / "real_prompts.jsonl", ROOT / "jobs" / "real_long_prompt.jsonl")
NUM_ROWS = 256
"""Tokens whose distributions are compared at once."""
DEFAULT_SCALES = "tensor"
"""Of a table without that column: no experiment of its run asked for others."""


@dataclass(frozen=True)
class Format:
    """How an engine computes and keeps KV, and the most that this may cost."""

    dtype: str
    kv_dtype: str = "auto"
    kv_scales: str = DEFAULT_SCALES
    mean_kl: float = 0.0
    """Limit of the KL divergence of a token, on average."""

    @property
    def kv(self) -> str:
        """Its KV in words."""
        scales = f", scales by {self.kv_scales}" if self.kv_dtype == "fp8_e4m3" else ""
        return self.dtype if self.kv_dtype == "auto" else f"{self.kv_dtype}{scales}"


FORMATS = (
    Format("float32", mean_kl=1e-6),
    Format("bfloat16", mean_kl=0.01),
    Format("float32", "fp8_e4m3", mean_kl=0.05),
    Format("float32", "fp8_e4m3", "token_head", mean_kl=0.05),
    Format("float32", "nvfp4", mean_kl=0.5),
)


@dataclass(frozen=True)
class Quality:
    """Of all tokens but the first of each text."""

    num_tokens: int
    mean_kl: float
    max_kl: float
    share_same_best: float
    perplexity: float

    def cells(self) -> list[str]:
        return [
            f"{self.num_tokens:,}",
            f"{self.mean_kl:.2g}",
            f"{self.max_kl:.2g}",
            f"{self.share_same_best:.1%}",
            f"{self.perplexity:.3f}",
        ]


# T tokens with a successor, V vocabulary


def compare(
    right: Sequence[torch.Tensor], found: Sequence[torch.Tensor], texts: Sequence[list[int]]
) -> Quality:
    """Compare float32 logits [T, V] of each text with the right ones."""
    divergences, same, loss = [], [], []
    for right_TV, found_TV, text in zip(right, found, texts, strict=True):
        assert right_TV.shape == found_TV.shape, (right_TV.shape, found_TV.shape)
        pieces = (piece.split(NUM_ROWS) for piece in (right_TV, found_TV, torch.tensor(text[1:])))
        for p_TV, q_TV, next_T in zip(*pieces, strict=True):
            p_TV, q_TV = p_TV.double().log_softmax(-1), q_TV.double().log_softmax(-1)
            divergences.append((p_TV.exp() * (p_TV - q_TV)).sum(-1))
            same.append(p_TV.argmax(-1) == q_TV.argmax(-1))
            loss.append(-q_TV.gather(1, next_T[:, None])[:, 0])
    kl, is_same, losses = torch.cat(divergences), torch.cat(same), torch.cat(loss)
    return Quality(
        len(kl), float(kl.mean()), float(kl.max()), float(is_same.double().mean()), float(losses.mean().exp())
    )


def right_logits(model: Path, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Ask transformers in float32 for logits [T, V] of each text."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [reference(torch.tensor([text[:-1]])).logits[0] for text in texts]


def engine_logits(config: EngineConfig, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Have an engine compute each text as a prompt; its logits [T, V] of them."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with ThreadEngine(config, timeout_s=600) as engine, seen_logits(engine) as seen:
        found = []
        for number, text in enumerate(texts):
            request = Request(request_id=str(number), prompt_token_ids=tuple(text), sampling=sampling)
            (done,) = engine.generate([request])
            if done.error is not None:
                raise done.error
            found.append(torch.cat(seen)[: len(text) - 1])
            seen.clear()
        return found


@contextmanager
def seen_logits(engine: ThreadEngine) -> Iterator[list[torch.Tensor]]:
    """Keep what rank 0 computes of prompts, in pieces [some, V]."""
    rank, seen = engine.ranks[0], []
    theirs = rank.prompt_logits

    def prompt_logits() -> Iterator[torch.Tensor]:
        for logits in theirs():
            seen.append(logits.clone())  # the next step overwrites them
            yield logits

    rank.prompt_logits = prompt_logits  # type: ignore[method-assign]
    yield seen


def measure_quality(
    model: Path, texts: Sequence[list[int]], formats: Sequence[Format] = FORMATS
) -> Iterator[tuple[Format, Quality]]:
    """Compare each format's engine, at TP 1, with transformers."""
    right = right_logits(model, texts)
    num_blocks = 2 + max(map(len, texts)) // 16 + 1
    for each in formats:
        config = EngineConfig(
            model=str(model),
            dtype=each.dtype,
            kv_dtype=each.kv_dtype,
            kv_scales=each.kv_scales,
            num_blocks=num_blocks,
            max_batch_tokens=512,
            max_seqs=1,
        )
        yield each, compare(right, engine_logits(config, texts), texts)


# --- cells ------------------------------------------------------------------------------------------


CELL_TITLES = (
    "cell",
    "dtype",
    "KV",
    "layouts",
    "transfer",
    "prompt tokens",
    "cached",
    "verdict",
    "tokens equal",
    "largest logprob gap",
    "bound",
    "digests",
    "MB moved",
    "s",
)


def cell_cells(cell: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """A cell's row, by CELL_TITLES."""
    sides = [cell["prefill.tp"], cell["decode.tp"]]
    layouts = [cell["prefill.effective_layout"], cell["decode.effective_layout"]]
    gaps = [cell[name] for name in ("max_logprob_error", "max_prompt_logprob_error") if _is_there(cell[name])]
    bounds = [cell[name] for name in ("logprob_bound", "prompt_logprob_bound") if _is_there(cell[name])]
    checked, wrong = cell["num_kv_bytes_checked"], cell["num_kv_bytes_mismatched"]
    kind = "vLLM " if "vllm" in str(cell.get("engine.kind")) else ""
    return [
        f"{kind}({', '.join(str(int(tp)) for tp in sides)})",
        str(cell["dtype"]),
        _kv_of(cell),
        " to ".join(str(layout) for layout in layouts),
        f"{cell['transfer.mode']}{', by the host' if cell.get('transfer.path') == 'host' else ''}",
        f"{sum(r['num_prompt_tokens'] for r in requests):,}",
        str(int(cell["num_cached_tokens"])),
        str(cell["verdict"]),
        _tokens_equal(cell, len(requests)),
        f"{max(gaps):.2g}" if gaps else "",
        f"{max(bounds):.2g}" if bounds else "",
        f"{int(wrong):,} wrong in {checked / 1e6:.1f} MB" if _is_there(checked) else "",
        f"{cell['transfer_bytes'] / 1e6:.1f}" if _is_there(cell["transfer_bytes"]) else "",
        f"{cell['wall_s']:.1f}",
    ]


def _is_there(value: Any) -> bool:
    return value is not None and value == value  # NaN where a table has nothing


def _kv_of(cell: Mapping[str, Any]) -> str:
    kept = str(cell["kv_dtype"])
    return "as it" if kept == "auto" else f"{kept}, scales by {cell.get('kv_scales', DEFAULT_SCALES)}"


def _tokens_equal(cell: Mapping[str, Any], num_requests: int) -> str:
    """How many requests have transformers' tokens, where they are compared."""
    if not _is_there(cell["num_token_mismatches"]):
        return ""
    if cell["first_divergence"] is None:
        return f"all of {num_requests}"
    return f"{num_requests - int(cell['num_token_mismatches'])} of {num_requests}, or nearly a tie"


def wrong_cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which cells prove nothing or the wrong thing."""
    for cell in cells:
        if cell["verdict"] != "PASS":
            yield f"{cell['cell_id']}: {cell['verdict']}: {cell['reason']}"
        if cell.get("engine.prefix_caching") is True and not cell["num_cached_tokens"]:
            yield f"{cell['cell_id']}: nothing was found in the prefix cache"
        if cell.get("transfer.path") == "host" and not cell["num_host_tokens"]:
            yield f"{cell['cell_id']}: nothing was loaded from the host tier"


def add_cells(page: Page, folders: Sequence[Path]) -> None:
    """Add a table of the runs' cells; those that are wrong go to `page.wrong`."""
    from rayk.reports import load
    from rayk.specs.marks import parse_yaml

    results = {folder: load(folder) for folder in folders}
    for result in results.values():
        name, day = parse_yaml(result.spec_yaml, "spec.yaml")[0]["name"], str(result.environment["started"])
        page.say(f"Experiment `{name}`, {len(result.cells)} cells, {day[:10]}:")
    page.say("")
    page.head(*CELL_TITLES)
    for folder, result in results.items():
        requests = result.requests.to_dict("records")
        cells = result.cells.to_dict("records")
        for cell in cells:
            page.row(*cell_cells(cell, [r for r in requests if r["cell_id"] == cell["cell_id"]]))
        page.wrong += wrong_cells(cells)
        if result.num_missing:
            page.wrong.append(f"{folder}: {result.num_missing} cells have not ended")


def run_specs(specs: Sequence[Path]) -> list[Path]:
    """Run experiment files as `rayk run` does; returns their folders."""
    from rayk.cli.run import run_spec

    folders = []
    for spec in specs:
        folders.append(Path("runs") / f"{spec.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        run_spec(spec, folders[-1], overrides=[], address=None, resume=False, strict=True)
    return folders


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add the tables; returns the formats that cost too much."""
    from rayk.actors.tokenizer import load_encoder
    from rayk.types.files import parse_json

    page.say("`prompt tokens` of which `cached` were in a prefix cache or the host tier.", "")
    add_cells(page, options.runs or run_specs(options.specs))
    encode = load_encoder(str(options.model))
    lines = [line for file in PROMPT_FILES for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [encode(parse_json(line)["prompt"]) for line in lines]
    page.say("", "Quality, of the same texts:", "")
    page.head("computed in", "KV", "tokens", "mean KL", "largest KL", "same best token", "perplexity")
    missed = []
    for each, quality in measure_quality(options.model, texts):
        page.row(each.dtype, each.kv, *quality.cells())
        if not quality.mean_kl <= each.mean_kl:
            missed.append(
                f"{each.dtype}, KV {each.kv}: mean KL {quality.mean_kl:.2g}, the limit is {each.mean_kl:g}"
            )
    return missed


def main() -> int:
    paths: dict[str, Any] = {"type": Path, "nargs": "+"}
    return run(
        fill,
        __file__,
        title="A real model: SmolLM2-135M-Instruct",
        model={"type": Path, "default": MODEL, "help": "folder of the checkpoint"},
        specs={**paths, "default": [ROOT / "jobs" / "real.yaml"], "help": "experiments to run"},
        runs={**paths, "help": "folders of runs to read in place of running anything"},
    )


if __name__ == "__main__":
    sys.exit(main())
