"""The cache through which transformers' models share keys and values, against a family that shares itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from rayk.oracle.checkpoint import read_marker, write_checkpoint
from rayk.oracle.reference import Reference
from rayk.oracle.sharing import SharingCache, kv_sources
from rayk.oracle.text import FedText
from rayk.oracle.tiny import HYBRID
from rayk.types.errors import UserError
from tests.conftest import CheckpointFactory
from tests.spec_models import LAST_REUSE, REUSE_IN_ORDER, TWICE_REUSED

KINDS = ["sliding_attention", "full_attention"]


def gemma3n(num_shared: int, kinds: list[str]) -> Any:
    """A tiny model, whose last layers transformers itself lets share."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=131,
        vocab_size_per_layer_input=131,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=24,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        laurel_rank=4,
        sliding_window=9,
        layer_types=kinds,
        activation_sparsity_pattern=[0.0] * len(kinds),
        num_kv_shared_layers=num_shared,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(11)
    return transformers.Gemma3nForCausalLM(config).eval()


class Plain:
    """A model's config without what says that it sees to sharing itself."""

    def __init__(self, config: Any, **values: Any) -> None:
        self.num_hidden_layers, self.layer_types = config.num_hidden_layers, config.layer_types
        self.__dict__ |= values

    def get_text_config(self) -> Plain:
        return self


@pytest.mark.parametrize(
    ("kinds", "num_shared", "expected"),
    [
        (KINDS * 3, 3, (None, None, None, 1, 2, 1)),
        ([*KINDS, *KINDS, "sliding_attention", "sliding_attention"], 2, (None,) * 4 + (2, 2)),
    ],
)
def test_a_cache_shares_as_the_family_that_shares_itself(
    kinds: list[str], num_shared: int, expected: tuple[int | None, ...]
) -> None:
    """Logits to the bit, piece by piece: one model shares by itself, one by its cache."""
    itself, by_cache = gemma3n(num_shared, kinds), gemma3n(0, kinds)
    missing = by_cache.load_state_dict(itself.state_dict(), strict=False).missing_keys
    assert all(re.search(r"\.(k_proj|v_proj|k_norm)\.", name) for name in missing)
    assert {int(name.split(".")[2]) for name in missing} == set(range(len(kinds) - num_shared, len(kinds)))

    assert kv_sources(itself.config) is None
    sources = kv_sources(Plain(itself.config, num_kv_shared_layers=num_shared))
    assert sources == expected
    token_ids = torch.randint(131, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    wanted, found = FedText(itself), FedText(by_cache)
    found.cache = SharingCache(sources)
    for first, last in ((0, 23), (23, 24), (24, 40)):
        assert torch.equal(found.feed(token_ids[first:last]), wanted.feed(token_ids[first:last]))
    unshared = FedText(by_cache)
    assert not torch.equal(unshared.feed(token_ids[:23]), FedText(itself).feed(token_ids[:23]))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_kv_shared_layers": 4}, "leaves no full_attention layer"),
        ({"num_kv_shared_layers": 3}, "leaves no full_attention layer"),
        ({"kv_sharing_targets": [None, None, 0]}, "3 entries for 4 layers"),
        (
            {"kv_sharing_targets": [None, None, 1, None]},
            "layer 2 cannot share the keys and values of layer 1",
        ),
        ({"kv_sharing_targets": [None, None, 2, None]}, "must come before"),
        ({"kv_sharing_targets": [2, None, None, None]}, "must come before"),
        ({"kv_sharing_targets": [None, None, -1, None]}, "must come before"),
        ({"kv_sharing_targets": [None, None, 0, 1], "num_kv_shared_layers": 2}, "both say"),
    ],
)
def test_values_that_no_model_can_have(values: dict[str, Any], problem: str) -> None:
    config = transformers.Qwen3Config(num_hidden_layers=4, layer_types=KINDS * 2, **values)
    with pytest.raises(ValueError, match=problem):
        kv_sources(config)


def test_the_writer_takes_the_keys_where_layers_attend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves no full_attention layer"):
        write_checkpoint("qwen3", tmp_path / "a", overrides={"num_kv_shared_layers": 4})
    with pytest.raises(UserError, match="unknown config key 'num_kv_shared_layers'"):
        write_checkpoint("mamba2", tmp_path / "b", overrides=LAST_REUSE)
    with pytest.raises(UserError, match="unknown config key 'kv_sharing_target'"):
        write_checkpoint("qwen3", tmp_path / "c", overrides={"kv_sharing_target": [None, None, 0, 1]})
    assert not list(tmp_path.iterdir())


CASES: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "qwen2": ("qwen2", dict(REUSE_IN_ORDER), (None, None, 0, 1)),
    "gemma3": ("gemma3", dict(LAST_REUSE), (None, None, 0, 1)),
    "qwen3-twice": ("qwen3", {**HYBRID, **TWICE_REUSED}, (None, None, 0, 1, None, None, 4, 5)),
}


def loaded(path: Path, **changes: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, config=config, attn_implementation="eager"
    ).eval()


def same_output(model: Any, path: Path) -> bool:
    """Whether greedy decoding still gives the promised tokens: one look at prompt and output at once."""
    for probe in read_marker(path)["probes"]:
        logits = FedText(model).feed(
            probe["prompt"] + probe["output"][:-1], logits_to_keep=len(probe["output"])
        )
        if logits.argmax(-1).tolist() != probe["output"]:
            return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_that_counts_changes_the_output_and_no_other(
    checkpoint: CheckpointFactory, case: str
) -> None:
    family, overrides, sources = CASES[case]
    path = checkpoint(family, overrides=overrides)
    model = loaded(path)
    assert kv_sources(model.config) == sources
    assert same_output(model, path)
    counts, idle = set(), set()
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        neutral = 1.0 if "norm" in name and family != "gemma3" else 0.0
        with torch.no_grad():
            parameter.fill_(neutral)
            (idle if same_output(model, path) else counts).add(name)
            parameter.copy_(kept)
    assert {int(name.split(".")[2]) for name in idle} == {i for i, s in enumerate(sources) if s is not None}
    made_by_sharing = [
        name
        for name, _ in model.named_parameters()
        if re.search(r"\.(k_proj|v_proj|k_norm)\.", name) and sources[int(name.split(".")[2])] is not None
    ]
    assert idle == set(made_by_sharing)
    assert same_output(model, path)


@pytest.mark.parametrize("case", CASES)
def test_other_targets_change_the_output(checkpoint: CheckpointFactory, case: str) -> None:
    """No sharing; for a model of one type of layers, another target; of two stretches, the first's alone."""
    family, overrides, sources = CASES[case]
    path = checkpoint(family, overrides=overrides)
    wrong: list[list[int | None]] = [[None] * len(sources)]
    if case == "qwen2":
        wrong.append([None, None, 1, 0])
    if case == "qwen3-twice":
        wrong += [[None, None, 0, 1, None, None, 0, 1], [None, None, 0, 1, None, None, None, 5]]
    for targets in wrong:
        model = loaded(path, num_kv_shared_layers=0, kv_sharing_targets=targets)
        assert not same_output(model, path), targets


def test_what_the_reference_says_is_said_with_sharing(checkpoint: CheckpointFactory) -> None:
    """generate, teacher_force, score and caches; what sharing layers would have kept is not there."""
    family, overrides, sources = CASES["qwen3-twice"]
    path = checkpoint(family, overrides=overrides)
    reference = Reference(path)
    probe = read_marker(path)["probes"][1]
    (told,) = reference.generate([probe["prompt"]], 24, ignore_eos=True)
    assert list(told.token_ids) == probe["output"]
    assert min(told.margins) > 0.03
    steps = reference.teacher_force(probe["prompt"], probe["output"])
    assert [step.argmax_id for step in steps] == probe["output"]
    scores = reference.score(probe["prompt"], probe["output"])
    assert max(scores.output_gaps) == 0.0
    assert scores.output_logprobs == pytest.approx(told.logprobs, abs=1e-3)
    kept = reference.caches(probe["prompt"])
    assert [sorted(fields) for fields in kept] == [["k", "v"] if s is None else [] for s in sources]
    assert {tuple(fields["k"].shape) for fields in kept if fields} == {(2, 37, 16)}
    # Layer 4 comes behind layers that share: its keys tell whether they shared.
    unshared = FedText(loaded(path, kv_sharing_targets=None))
    unshared.feed(probe["prompt"], logits_to_keep=1)
    assert torch.equal(unshared.cache.layers[0].keys[0], kept[0]["k"])
    assert not torch.allclose(unshared.cache.layers[4].keys[0], kept[4]["k"], atol=0.1)


def test_a_checkpoint_is_stored_as_transformers_stores_it(checkpoint: CheckpointFactory) -> None:
    """With tensors of sharing layers that nothing reads; and with the keys."""
    family, overrides, sources = CASES["qwen2"]
    path = checkpoint(family, overrides=overrides)
    assert transformers.AutoConfig.from_pretrained(path).kv_sharing_targets == list(sources)
    with safe_open(str(path / "model.safetensors"), "pt") as file:
        assert "model.layers.2.self_attn.k_proj.weight" in file.keys()  # noqa: SIM118 - not a dict
