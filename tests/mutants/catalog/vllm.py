"""Bugs of how a vLLM engine's caches are read."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.mutants.mutant import Catalog

VLLM = Catalog("tests/vllm")


@VLLM.twin(
    "a block is read by its shape",
    "rayk.vllm.store_map:FieldMap.read",
    "test_caches.py::test_the_same_kv_has_the_same_words_in_every_engine",
)
def _(original, self, blocks):
    in_order = torch.arange(self.index.numel()).view(self.index.shape)
    return original(replace(self, index=in_order), blocks)


@VLLM.twin(
    "a mixer keeps the number that vLLM counts on",
    "rayk.vllm.layer_caches:layer_number",
    "test_caches.py::test_words_are_those_of_the_plain_values",
)
def _(original, name, num_layers):
    return original(name, 2 * num_layers)


@VLLM.twin(
    "each rank has a group of B and C of its own",
    "rayk.vllm.layer_caches:_mamba2_spec",
    "test_caches.py::test_ranks_that_share_heads_have_the_same_words",
)
def _(original, spec, layer):
    return replace(original(spec, layer), num_groups=layer.n_groups)


@VLLM.twin(
    "rows of the local prefix are digested",
    "rayk.vllm.caches:ProvenCaches.digests",
    "test_caches.py::test_rows_before_the_first_are_left_out",
)
def _(original, self, block_ids, num_tokens, first_row=0):
    return original(self, block_ids, num_tokens)


@VLLM.twin(
    "windows are compared wherever both have a word",
    "rayk.vllm.proof_compare:_first_whole_rows",
    "test_proof_compare.py::test_windows_and_chunks_that_begin_elsewhere_are_not_wrong",
)
def _(original, views, *num_tokens):
    return original(views, *num_tokens) * 0


@VLLM.twin(
    "a ticket without ranks is not proven",
    "rayk.vllm.halves:WorkerHalf._skips",
    "test_halves.py::test_a_ticket_cannot_talk_d_out_of_proving_every_request",
)
def _(original, self, ticket):
    return original(self, ticket) or not ticket.ranks
