"""Drafters against modules that are not rayk's, in float64: rows in any chunks, proposals, any TP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator

from rayk.models.unused import unused_tensors
from rayk.oracle.drafting import model_hidden, proposals
from rayk.oracle.eagle3 import Eagle3Head, write_eagle3
from rayk.oracle.mtp import TransformersMtp, add_mtp
from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches, poison
from tests.markers import one_per
from tests.models.drafting import (
    CUTS,
    Fed,
    PagedDrafter,
    chunks,
    find,
    load_both,
    model_outputs,
    reloaded,
)
from tests.models.test_decoder import prompts
from tests.models.tiny import (
    Checkpoint,
    load,
    reference_logits,
    run_ranks,
    wide_scans,
    write_checkpoint,
)

ATTENDS_LAST = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
MTP: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"num_nextn_predict_layers": 1}),
    "deepseek_v3-two": ("deepseek_v3", {"num_nextn_predict_layers": 2}),
    "qwen3_next": (
        "qwen3_next",
        {"num_nextn_predict_layers": 1, "layer_types": ATTENDS_LAST, "mlp_only_layers": []},
    ),
    "qwen3_next-dense": (
        "qwen3_next",
        {"num_nextn_predict_layers": 1, "layer_types": ATTENDS_LAST, "mlp_only_layers": [0, 1]},
    ),
}
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 6}, {}),
    "llama-normed": (
        "llama",
        {"num_hidden_layers": 6},
        {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 5], "attention_bias": True},
    ),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 5}, {"draft_vocab_size": 263}),
    "falcon_h1": ("falcon_h1", {"num_hidden_layers": 4}, {"num_key_value_heads": 8}),
}


@pytest.fixture(scope="module")
def mtp(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Any, Any]:
    """A checkpoint with MTP layers, and these by transformers in float32 and in float64."""
    family, overrides = MTP[request.param]
    saved = write_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)
    add_mtp(saved.path, saved.model, overrides["num_nextn_predict_layers"], seed=4, dtype=torch.float32)
    eager = TransformersMtp(reloaded(saved.path))
    exact = copy.deepcopy(eager)
    exact.model.double()
    return saved, eager, exact


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A checkpoint, and an EAGLE-3 head for it."""
    family, overrides, of_head = HEADS[request.param]
    saved = write_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)
    folder = tmp_path_factory.mktemp("heads") / request.param
    return saved, write_eagle3(folder, saved.path, seed=3, overrides=of_head)


def cases(fixture: str, *pairs: tuple[str, int, int | None]) -> Any:
    """(fixture, TP of the model, TP of the drafter)."""
    return pytest.mark.parametrize((fixture, "tp", "own_tp"), pairs, indirect=[fixture])


def same_on_all(ranks: Sequence[Any]) -> Any:
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            assert torch.equal(mine, theirs), "ranks of one group return different bits"
    return ranks[0]


def run_rows(
    checkpoint: Checkpoint, tp: int, own_tp: int | None, depths: int = 1, **settings: Any
) -> list[torch.Tensor]:
    """Logits of every row of every prompt, of the last depth: model and drafter in unlike chunks, rows
    of the drafter of several requests in one step."""
    config, ids = find(checkpoint, tp, tp=own_tp, **settings), prompts()

    def body(comm: Any) -> list[torch.Tensor]:
        decoder, drafter = load_both(checkpoint, config, comm)
        outputs = [model_outputs(decoder, (comm.size, comm.rank), text, CUTS[0]) for text in ids]
        state = [drafter.combine(output)[:-1] for output in outputs]
        paged = PagedDrafter(drafter, len(ids))
        for depth in range(depths):
            rows = [text[depth + 1 :] for text in ids]
            parts: list[list[torch.Tensor]] = [[] for _ in ids]
            cut = [chunks(CUTS[r % 2], len(tokens)) for r, tokens in enumerate(rows)]
            for step in range(max(map(len, cut))):
                fed = [
                    Fed(tokens[c[step].start : c[step].stop], c[step].start, h[c[step].start : c[step].stop])
                    if step < len(c)
                    else None
                    for tokens, c, h in zip(rows, cut, state, strict=True)
                ]
                for r, found in enumerate(paged.forward(fed, depth)):
                    parts[r] += [found] if found.numel() else []
            state = [
                torch.cat(some)[: len(tokens) - 1] if depth + 1 < depths else torch.cat(some)
                for some, tokens in zip(parts, rows, strict=True)
            ]
        return [drafter.logits(hidden) for hidden in state]

    return same_on_all(run_ranks(tp, body))


def right_rows(
    drafter: Any, model: Any, ids: Sequence[int], layers: Sequence[int] = (), depths: int = 1
) -> torch.Tensor:
    """The same of one prompt, over the whole text."""
    hidden = model_hidden(model, ids, layers)[:-1]
    with torch.inference_mode():
        hidden = drafter.fc(hidden) if layers else hidden
        for depth in range(depths):
            tokens = torch.tensor(ids[depth + 1 :])
            hidden = drafter.rows(tokens, hidden[: len(tokens)], depth)
        found: torch.Tensor = drafter.logits(hidden)
    return found


@one_per()
@cases(
    "mtp",
    *(("deepseek_v3", tp, own) for tp, own in ((1, None), (2, None), (2, 2))),
    ("deepseek_v3-two", 1, None),
    *(("qwen3_next", tp, own) for tp, own in ((1, None), (2, None), (2, 2), (4, 4))),
    ("qwen3_next-dense", 2, 2),
)
def test_rows_of_mtp_layers_equal_transformers(
    mtp: tuple[Checkpoint, Any, Any], tp: int, own_tp: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, eager, exact = mtp
    with poison(monkeypatch):
        logits = run_rows(saved, tp, own_tp, eager.depths, method="mtp", num_tokens=eager.depths)
    with wide_scans(saved.exact):
        wide = [right_rows(exact, saved.exact, ids, depths=eager.depths) for ids in prompts()]
    narrow = [right_rows(eager, saved.model, ids, depths=eager.depths) for ids in prompts()]
    assert_matches(torch.cat(logits), torch.cat(wide), torch.cat(narrow), what="logits of rows")


@one_per()
@cases(
    "head",
    *(("llama", tp, own) for tp, own in ((1, None), (2, None), (2, 2), (4, 4))),
    ("llama-normed", 2, 2),
    ("gpt_oss", 2, None),
    ("falcon_h1", 2, 2),
)
def test_rows_of_eagle3_heads_equal_a_module_of_llama(
    head: tuple[Checkpoint, Path], tp: int, own_tp: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, folder = head
    settings = {"method": "eagle3", "model": str(folder)}
    with poison(monkeypatch):
        logits = run_rows(saved, tp, own_tp, **settings)
    eager = Eagle3Head.read(folder, saved.model.get_input_embeddings().weight)
    exact, taps = copy.deepcopy(eager).double(), find(saved, **settings).taps
    with wide_scans(saved.exact):
        wide = torch.cat([right_rows(exact, saved.exact, ids, taps) for ids in prompts()])
    narrow = torch.cat([right_rows(eager, saved.model, ids, taps) for ids in prompts()])
    found = torch.cat(logits)
    allowed = wide.isfinite()
    assert torch.equal(allowed, found.isfinite()), "the head proposes other tokens"
    assert allowed[0].sum() == eager.lm_head.out_features
    assert_matches(found[allowed], wide[allowed], narrow[allowed], what="logits of rows")


@one_per("head")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("head", ["llama", "gpt_oss", "falcon_h1"], indirect=True)
def test_tapped_streams_equal_transformers_hidden_states(head: tuple[Checkpoint, Path], tp: int) -> None:
    saved, _ = head
    ids, layers = prompts()[1], (0, 2, saved.config.num_layers - 1)

    def body(comm: Any) -> list[torch.Tensor]:
        decoder = load(saved, comm)
        decoder.taps = layers
        return [model_outputs(decoder, (comm.size, comm.rank), ids, cuts) for cuts in CUTS]

    with wide_scans(saved.exact):
        exact = model_hidden(saved.exact, ids, layers)
    eager = model_hidden(saved.model, ids, layers)
    for found in same_on_all(run_ranks(tp, body)):
        assert_matches(found, exact, eager, what="streams")


@pytest.mark.parametrize("mtp", ["deepseek_v3", "qwen3_next"], indirect=True)
def test_proposals_of_one_mtp_layer(mtp: tuple[Checkpoint, Any, Any]) -> None:
    """Its proposals are further rows, which later rows overwrite."""
    saved, eager, exact = mtp
    config = find(saved, method="mtp", num_tokens=3)
    with torch.inference_mode():
        decoder, drafter = load_both(saved, config, LocalComm())
        check_proposals(saved, decoder, drafter, eager, exact)


@pytest.mark.parametrize("head", ["llama", "falcon_h1"], indirect=True)
def test_proposals_of_eagle3_heads(head: tuple[Checkpoint, Path]) -> None:
    saved, folder = head
    config = find(saved, method="eagle3", model=str(folder), num_tokens=3)
    eager = Eagle3Head.read(folder, saved.model.get_input_embeddings().weight)
    with torch.inference_mode():
        decoder, drafter = load_both(saved, config, LocalComm())
        check_proposals(saved, decoder, drafter, eager, copy.deepcopy(eager).double())


def check_proposals(saved: Checkpoint, decoder: Any, drafter: Any, eager: Any, exact: Any) -> None:
    """Three tokens after texts that grow by one, two and three tokens, as if so many were accepted."""
    ids, taps = prompts()[1], drafter.config.taps
    hidden = drafter.combine(model_outputs(decoder, (1, 0), ids, CUTS[0]))
    states = []
    for model, right in ((saved.model, eager), (saved.exact, exact)):
        with wide_scans(model):
            whole = model_hidden(model, ids, taps)
        states.append(right.fc(whole) if taps else whole)
    paged, seen = PagedDrafter(drafter, 1), 0
    for length in (9, 10, 12, 15, 18, 19):
        text = ids[:length]
        found = paged.propose(text, hidden, seen, 3)
        seen = length - 1
        with wide_scans(saved.exact):
            wanted, wide = proposals(exact, text, states[1], 3)
        _, narrow = proposals(eager, text, states[0], 3)
        assert found.argmax(-1).tolist() == wanted
        allowed = wide.isfinite()
        assert_matches(
            found[allowed], wide[allowed], narrow[allowed], what=f"proposals after {length} tokens"
        )


@pytest.mark.parametrize("mtp", ["deepseek_v3-two"], indirect=True)
def test_proposals_of_two_mtp_layers_in_turn(mtp: tuple[Checkpoint, Any, Any]) -> None:
    """Each layer proposes one; rows that read a proposal are computed again."""
    saved, eager, exact = mtp
    ids, config = prompts()[1], find(saved, method="mtp", num_tokens=2)
    assert config.depths == 2
    whole = [model_hidden(model, ids) for model in (saved.model, saved.exact)]
    with torch.inference_mode():
        decoder, drafter = load_both(saved, config, LocalComm())
        hidden = model_outputs(decoder, (1, 0), ids, CUTS[0])
        paged, again = PagedDrafter(drafter, 1), 100
        for length in (9, 10, 12, 14):
            found = paged.propose_in_turn(ids[:length], hidden, 2, again)
            again = 4  # two new tokens at most, and one row that read a proposal
            wanted, wide = proposals(exact, ids[:length], whole[1], 2)
            _, narrow = proposals(eager, ids[:length], whole[0], 2)
            assert found.argmax(-1).tolist() == wanted
            assert_matches(found, wide, narrow, what=f"proposals after {length} tokens")


@pytest.mark.parametrize("mtp", ["deepseek_v3", "deepseek_v3-two"], indirect=True)
def test_what_generate_proposes_is_what_the_whole_text_does(
    mtp: tuple[Checkpoint, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' generate(use_mtp=True) drafts with caches that it crops; the oracle has none."""
    saved, eager, _ = mtp
    model, drafted = reloaded(saved.path), []
    TransformersMtp(model)  # which tells it what layers there are
    get = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        found = get(self, input_ids, *rest, **more)
        drafted.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    prompt = prompts()[0]
    with torch.inference_mode():
        model.generate(
            torch.tensor([prompt]), use_mtp=True, max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    drafted = [(text, found) for text, found in drafted if found]
    assert len(drafted) >= 4
    for text, found in drafted:
        wanted, _ = proposals(eager, text, model_hidden(saved.model, text), eager.depths)
        assert found == wanted


@one_per()
@pytest.mark.parametrize("tp", [1, 2])
def test_a_smaller_model_proposes_what_it_would_answer(
    tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = write_checkpoint(tmp_path / "model", "llama")
    small = write_checkpoint(tmp_path / "small", "mistral", num_hidden_layers=2, sliding_window=21)
    config = find(saved, tp, method="draft", model=str(small.path), tp=tp)
    assert config.keys == ((3, "attention"), (4, "attention"))
    ids = prompts()

    def body(comm: Any) -> list[torch.Tensor]:
        _, drafter = load_both(saved, config, comm)
        paged = PagedDrafter(drafter, len(ids))
        halves = [[Fed(t[:4], 0, None) for t in ids], [Fed(t[4:], 4, None) for t in ids]]
        found = [paged.forward(fed) for fed in halves]
        return [drafter.logits(torch.cat(both)) for both in zip(*found, strict=True)]

    with poison(monkeypatch):
        logits = same_on_all(run_ranks(tp, body))
    for text, found in zip(ids, logits, strict=True):
        wide, narrow = (reference_logits(model, text) for model in (small.exact, small.model))
        assert_matches(found, wide, narrow, what="logits")


@pytest.mark.parametrize("mtp", ["deepseek_v3", "qwen3_next"], indirect=True)
def test_the_model_itself_leaves_mtp_layers_out(mtp: tuple[Checkpoint, Any, Any]) -> None:
    saved, _, _ = mtp
    ids = prompts()[0]
    assert torch.equal(reference_logits(reloaded(saved.path), ids), reference_logits(saved.model, ids))
    assert unused_tensors(saved.path, saved.config), "the model reads them"
