"""llama.cpp through llama-cpp-python, which loads a GGUF file that the `gguf` package writes."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from jobs.benchmarks.peer_workers.contract import Job, Notes, Prompts, Run, serve

TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
EXACT = "KV in float32, no flash attention, which would round to float16"
ITS_OWN = "KV in float16 and flash attention, as it comes"
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""transformers' names -> GGUF's."""
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class LlamaCpp:
    """One context, whose sequences are the requests of a run; tokens are chosen by its own greedy sampler."""

    name = "llama.cpp"

    def __init__(self, file: str, job: Job) -> None:
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
        self._kept = quiet
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = job.max_requests * -(-job.max_length // 256) * 256
        settings.n_batch = job.max_requests * job.max_prompt
        settings.n_seq_max = job.max_requests
        settings.n_threads = settings.n_threads_batch = 1
        if job.dtype == "float32":
            # As it comes, its logits are off by 0.01, and without by 0.00001: tokens differ.
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(model, settings)
        assert self._context, "llama.cpp made no context"
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._greedy = llama_cpp.llama_sampler_init_greedy()

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        notes = Notes(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        rows = [(i, at, token) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        ends = [at == len(prompts[i]) - 1 for i, at, _ in rows]
        for step in range(num_tokens):
            chosen = list(self._step(rows, ends))
            for i, token in enumerate(chosen):
                notes.add(i, [token])
            rows = [(i, len(prompts[i]) + step, token) for i, token in enumerate(chosen)]
            ends = [True] * len(rows)
        return notes.run()

    def _step(self, rows: list[tuple[int, int, int]], are_wanted: list[bool]) -> Iterator[int]:
        """Compute rows of (sequence, position, token), and choose a token after each that is wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = are_wanted[i]
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        for i, is_wanted in enumerate(are_wanted):
            if is_wanted:
                yield llama_cpp.llama_sampler_sample(self._greedy, self._context, i)


def convert(job: Job, file: Path) -> None:
    """Write the checkpoint as GGUF, matrices in the job's type, norms in float32 as its own script does."""
    config, weights = job.config(), load_file(job.folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in weights.items():
        theirs = _name(name)
        if ".attn_q" in theirs or ".attn_k" in theirs:
            weight = _pairs_side_by_side(weight, heads if ".attn_q" in theirs else kv_heads)
        kind = TYPES[job.dtype] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{OF_LAYER[part]}.weight"


def _pairs_side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head in the order of llama.cpp's rotation, which turns rows 2i and 2i + 1 together;
    transformers' turns i and i + width / 2."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def load(job: Job) -> tuple[LlamaCpp, str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        convert(job, file)
        engine = LlamaCpp(str(file), job)
    how = EXACT if job.dtype == "float32" else ITS_OWN
    return engine, f"llama-cpp-python {llama_cpp.__version__}, built for this CPU; {how}"


if __name__ == "__main__":
    serve(load)
