"""Answer flags of vLLM's `serve` and `bench serve` that rayk lacks with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from rayk.cli.guard import BAD_INPUT, complain
from rayk.types.errors import UserError

# command -> flag -> what to use
HINTS: Mapping[str, Mapping[str, str]] = {
    "serve": {
        "--gpu-memory-utilization": "--set engine.num_blocks=N sizes the KV pool",
        "--num-gpu-blocks-override": "--set engine.num_blocks=N",
        "--block-size": "--set prefill.block_size=N, and decode.block_size=N",
        "--max-num-batched-tokens": "--set engine.max_batch_tokens=N",
        "--enable-prefix-caching": "--set engine.prefix_caching=true",
        "--no-enable-prefix-caching": "--set engine.prefix_caching=false",
        "--attention-backend": "--set engine.attention_backend=NAME",
        "--data-parallel-size": "--num-prefill N and --num-decode N engines",
        "--kv-transfer-config": "--prefill-tp N --decode-tp M, --set transfer.mode=pull|push",
        "--swap-space": "--set offload.host_gib=N",
        "--cpu-offload-gb": "weights stay on the device; --set offload.host_gib=N is for KV",
        "--model": "the checkpoint's folder, as the first argument",
        "--tokenizer": "the tokenizer is the checkpoint's own",
        "--chat-template": "the chat template is that of the checkpoint's tokenizer",
        "--enable-auto-tool-choice": "tools are on; --tool-call-parser NAME, or auto, which is the default",
        "--load-format": "safetensors alone; `rayk checkpoint` makes random weights",
        "--quantization": "weights are as in the checkpoint; --kv-cache-dtype is for KV",
        "--prefill-context-parallel-size": "--prefill-dcp N deals the KV; prompts are computed whole",
        "--trust-remote-code": "no code of checkpoints is run; leave it out",
        "--enforce-eager": "--set engine.cuda_graphs=false",
        "--seed": "requests have a seed each",
        "--root-path": "a proxy in front",
    },
    "bench": {
        "--num-prompts": "--num-requests N",
        "--random-input-len": "--input-tokens N",
        "--random-output-len": "--output-tokens N",
        "--random-range-ratio": "--input-tokens LOW-HIGH",
        "--random-prefix-len": "--prefix-tokens N",
        "--sharegpt-output-len": "--output-tokens N",
        "--base-url": "--url http://HOST:PORT",
        "--host": "--url http://HOST:PORT",
        "--port": "--url http://HOST:PORT",
        "--endpoint": "--chat for /v1/chat/completions",
        "--backend": "every server of OpenAI's API is spoken to alike; leave it out",
        "--endpoint-type": "every server of OpenAI's API is spoken to alike; leave it out",
        "--goodput": "--slo ttft=200ms,tpot=20ms",
        "--percentile-metrics": "all metrics are told; leave it out",
        "--metric-percentiles": "all that the sample supports are told; leave it out",
        "--save-result": "results are always saved; --out FOLDER",
        "--result-dir": "--out FOLDER",
        "--tokenizer": "the server counts tokens; leave it out",
        "--num-warmups": "--warmup N cuts the first requests",
    },
}


class WithHints(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Exits with 2 and a hint where a flag is one that rayk lacks."""
        for word in args:
            flag = word.partition("=")[0].replace("_", "-")
            hint = HINTS[self.name or ""].get(flag)
            if hint is not None:
                complain(UserError("rayk has no such flag of vLLM's", where=flag, mend=hint))
                raise typer.Exit(BAD_INPUT)
        return super().parse_args(ctx, args)
