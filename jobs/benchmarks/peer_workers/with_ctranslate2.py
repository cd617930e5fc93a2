"""ctranslate2, which loads a file that its own model specification writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerDecoderModelSpec
from safetensors.numpy import load_file

from jobs.benchmarks.peer_workers.contract import Job, Notes, Prompts, Run, Unsupported, serve


class Generator:
    """ctranslate2's generator, which tells of each token by a callback."""

    name = "ctranslate2"

    def __init__(self, folder: str, dtype: str) -> None:
        self._generator = ctranslate2.Generator(
            folder, device="cpu", compute_type=dtype, inter_threads=1, intra_threads=1
        )

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        words = [[str(token) for token in prompt] for prompt in prompts]
        notes = Notes(len(prompts))

        def note(step: Any) -> bool:
            notes.add(step.batch_id, [step.token_id])
            return False

        self._generator.generate_batch(
            words,
            max_length=num_tokens,
            include_prompt_in_result=False,
            end_token=[NO_TOKEN],
            callback=note,
        )
        return notes.run()


NO_TOKEN = 1 << 30
"""An end that no vocabulary holds: its own would stop a request early."""


def convert(job: Job, folder: Path) -> None:
    """Write the checkpoint by ctranslate2's specification, which has query, key and value in one matrix."""
    config, weights = job.config(), load_file(job.folder / "model.safetensors")
    spec = TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_parameters"]["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    decoder.projection.weight = weights["lm_head.weight"]
    for number, layer in enumerate(decoder.layer):
        _fill_layer(layer, weights, f"model.layers.{number}")
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    # The tokens of special meaning must be words of the vocabulary; none is used.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.register_vocabulary([str(token) for token in range(config["vocab_size"])])
    spec.validate()
    spec.save(str(folder))


def _fill_layer(layer: Any, weights: dict[str, np.ndarray], name: str) -> None:
    def of(part: str) -> np.ndarray:
        return weights[f"{name}.{part}.weight"]

    layer.self_attention.layer_norm.gamma = of("input_layernorm")
    layer.self_attention.linear[0].weight = np.concatenate([of(f"self_attn.{x}_proj") for x in "qkv"])
    layer.self_attention.linear[1].weight = of("self_attn.o_proj")
    layer.ffn.layer_norm.gamma = of("post_attention_layernorm")
    layer.ffn.linear_0.weight = of("mlp.gate_proj")
    layer.ffn.linear_0_noact.weight = of("mlp.up_proj")
    layer.ffn.linear_1.weight = of("mlp.down_proj")


def load(job: Job) -> tuple[Generator, str]:
    """The generator. Raises Unsupported for a type that ctranslate2 would replace by another one."""
    there = ctranslate2.get_supported_compute_types("cpu")
    if job.dtype not in there:
        raise Unsupported(f"no {job.dtype} on this CPU, only {', '.join(sorted(there))}")
    with tempfile.TemporaryDirectory() as folder:
        convert(job, Path(folder))
        return Generator(folder, job.dtype), ctranslate2.__version__


if __name__ == "__main__":
    serve(load)
