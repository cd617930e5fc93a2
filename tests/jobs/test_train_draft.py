"""jobs/train_draft.py: a head's steps beside the oracle's, its file, texts, training and tallies."""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from jobs import draft_acceptance, draft_head, draft_text
from rayk.oracle.eagle3 import Eagle3Head
from rayk.types.errors import CheckpointError, UserError
from tests.conftest import CheckpointFactory

VOCAB, DRAFT_IDS = 41, [1, 2, 5, 9, 20, 21, 33, 40]
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=35,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@pytest.fixture
def job() -> Any:
    return importlib.import_module("jobs.train_draft")


@pytest.fixture
def drawn() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def head(drawn: None) -> draft_head.Head:
    """A head of drawn weights, its norms among them."""
    made = draft_head.Head(draft_head.head_config(TARGET, len(DRAFT_IDS)), torch.tensor(DRAFT_IDS))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return made.eval()


# --- the head -----------------------------------------------------------------------------------------


def one_by_one(
    oracle: Eagle3Head, states: Tensor, tokens: Sequence[int], given: Sequence[int | None]
) -> tuple[list[Tensor], list[int]]:
    """Draft behind `tokens`, which lie one behind the states [R, 3 H], every row anew for each of them; a
    step takes what is `given`, or else its own token. Returns outputs and tokens by step."""
    hidden, fed = oracle.fc(states), list(tokens)
    outputs, drafted = [], []
    for token in given:
        outputs.append(oracle.rows(torch.tensor(fed), hidden)[-1])
        drafted.append(int(oracle.logits(outputs[-1][None])[0].argmax()))
        hidden = torch.cat([hidden, outputs[-1][None]])
        fed.append(drafted[-1] if token is None else token)
    return outputs, drafted


@pytest.mark.parametrize("own", [True, False], ids=["drafting", "the text's tokens"])
def test_steps_are_those_of_drafts_one_by_one(head: Any, tmp_path: Path, own: bool) -> None:
    """From every row of two texts at once, against one draft after the other by the oracle, from the file."""
    head.save(tmp_path)
    embed = nn.Embedding(VOCAB, TARGET.hidden_size)
    oracle = Eagle3Head.read(tmp_path, embed.weight)
    states, tokens = torch.randn(2, 9, 3 * TARGET.hidden_size), torch.randint(VOCAB, (2, 9))
    num_steps, drafts = 4, Counter[int]()
    with torch.no_grad():
        steps = list(head.unroll(states, tokens, embed, num_steps, own=own))
        best = [head.best(step) for step in steps]
        for text in range(2):
            for row in range(9 - num_steps + 1):
                ids = tokens[text].tolist()
                given = [None] * num_steps if own else [*ids[row + 1 :], 0][:num_steps]
                outputs, drafted = one_by_one(oracle, states[text, : row + 1], ids[: row + 1], given)
                for s, right in enumerate(outputs):
                    torch.testing.assert_close(steps[s][text, row + s], right, rtol=1e-4, atol=1e-5)
                assert [int(best[s][text, row + s]) for s in range(num_steps)] == drafted
                drafts.update(drafted)
    assert len(drafts) > 3
    assert set(drafts) <= set(DRAFT_IDS)


def test_the_file_has_the_names_and_shapes_of_the_public_format(head: Any, tmp_path: Path) -> None:
    head.save(tmp_path)
    found = {name: (tuple(t.shape), t.dtype) for name, t in load_file(tmp_path / "model.safetensors").items()}
    hidden, wide, inner, queries, keys = 24, 48, 35, 32, 16
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (queries, wide),
        "midlayer.self_attn.k_proj.weight": (keys, wide),
        "midlayer.self_attn.v_proj.weight": (keys, wide),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (len(DRAFT_IDS), hidden),
    }
    expected: dict[str, Any] = {name: (shape, torch.float32) for name, shape in shapes.items()}
    expected |= {"d2t": ((len(DRAFT_IDS),), torch.int64), "t2d": ((VOCAB,), torch.bool)}
    assert found == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(DRAFT_IDS))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["rope_parameters"] == TARGET.rope_parameters


def test_a_loaded_head_is_the_saved_one(head: Any, tmp_path: Path) -> None:
    head.save(tmp_path)
    loaded = draft_head.Head.read(tmp_path)
    assert loaded.target_ids.tolist() == DRAFT_IDS
    assert loaded.t2d.nonzero()[:, 0].tolist() == DRAFT_IDS
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="no EAGLE-3 head"):
        draft_head.Head.read(tmp_path)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(32, (2, 16, 29)), (30, (2, 15, 27)), (7, (2, 3, 4)), (6, (3, 4, 5)), (3, (0, 1, 2))],
)
def test_layers_by_default(num_layers: int, layers: tuple[int, ...]) -> None:
    """32: those of vLLM for Llama 3.1 8B. Below 7 layers vLLM's would not be three."""
    assert draft_head.default_layers(num_layers) == layers


def test_a_model_of_two_layers_has_no_head() -> None:
    with pytest.raises(UserError, match="2 layers"):
        draft_head.default_layers(2)


def test_the_most_frequent_tokens_are_drafted() -> None:
    ids, covered = draft_head.frequent_ids([7, 7, 7, 2, 2, 5, 3, 9], vocab_size=12, draft_vocab=3)
    assert ids.tolist() == [2, 3, 7]  # of 3, 5 and 9 the lowest
    assert covered == 6 / 8


# --- the text -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(checkpoint: CheckpointFactory) -> draft_text.Target:
    return draft_text.Target(checkpoint("llama"))


def test_states_are_the_inputs_of_the_layers(target: Any) -> None:
    seen: dict[int, Tensor] = {}
    hooks = [
        target.model.model.layers[layer].register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: seen.update(
                {layer: (args[0] if args else kwargs["hidden_states"])[0].clone()}
            ),
            with_kwargs=True,
        )
        for layer in (1, 2, 3)
    ]
    looked = target.look(draft_text.Text([5, 300, 7, 9], [False] * 4, 2, 0.0))
    for hook in hooks:
        hook.remove()
    assert target.layers == (1, 2, 3)
    assert torch.equal(looked.states, torch.cat([seen[layer] for layer in (1, 2, 3)], -1))
    logits = target.model(torch.tensor([[5, 300, 7, 9]])).logits[0]
    torch.testing.assert_close(looked.final @ target.lm_head.T, logits)
    torch.testing.assert_close(looked.log_sum, logits.logsumexp(-1))


def test_greedy_text_is_transformers_own(target: Any) -> None:
    """Of prompts of unlike lengths in one batch, each up to its first stop token."""
    prompts = [[5, 300, 7], [9, 8, 7, 6, 5, 400, 12], [77]]
    right = [
        target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    draw = torch.Generator().manual_seed(0)
    assert target.write(prompts, [0.0] * 3, 12, [], draw) == right
    stop = right[1][4]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in right]
    assert target.write(prompts, [0.0] * 3, 12, [stop], draw) == cut


def test_drawn_tokens_have_the_models_distribution(target: Any) -> None:
    prompt, count, temperature = [5, 300, 7], 4000, 0.6
    draw = torch.Generator().manual_seed(3)
    drawn = target.write([prompt] * count, [temperature] * count, 1, [], draw)
    right = (target.model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(right))
    likely = right * count > 5
    others = float(right[~likely].sum() * count)
    cells = [(float(n), float(p * count)) for n, p in zip(counts[likely], right[likely], strict=True)]
    cells += [(float(counts[~likely].sum()), others)] if others > 5 else []
    chi_square = sum((n - expected) ** 2 / expected for n, expected in cells)
    freedom = len(cells) - 1
    assert freedom > 10
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_texts_are_half_greedy_and_kept(target: Any, tmp_path: Path) -> None:
    """A file is gone on with, by whole batches."""
    wanted, file = draft_text.Wanted("random", 5, 0.7, seed=1), tmp_path / "texts"
    texts = draft_text.written_texts(target, wanted, 34, file)
    assert [text.temperature for text in texts] == [0.0, 0.7] * 17
    for text in texts:
        assert text.own == [False] * text.answer + [True] * 5
        assert len(text.token_ids) == text.answer + 5
        assert 4 <= text.answer <= 64
        assert not set(text.token_ids[: text.answer]) & {0, 1, 2}
    assert len({tuple(text.token_ids) for text in texts}) == 34
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 65
    file.write_text("".join(lines[:33]))
    assert draft_text.written_texts(target, wanted, 34, file) == texts
    assert file.read_text() == "".join(lines)
    file.write_text("".join(lines[:-1]) + "}")
    with pytest.raises(UserError, match="damaged"):
        draft_text.written_texts(target, wanted, 34, file)
    file.write_text("".join(lines))
    other = draft_text.Wanted("random", 5, 0.7, seed=2)
    with pytest.raises(UserError, match="other options"):
        draft_text.written_texts(target, other, 1, file)
    assert draft_text.written_texts(target, other, 1) != texts[:1]


def test_chats_have_the_models_template_around_what_it_makes_up(target: Any) -> None:
    before, after = draft_text.chat_frame(target)
    assert target.tokenizer.decode(before) == "<|bos|>[user]\n"
    assert target.tokenizer.decode(after) == "\n<|eos|>[assistant]\n"
    for ids, own in draft_text.chat_prompts(target, 3, torch.Generator().manual_seed(0)):
        said = len(ids) - len(before) - len(after)
        assert own == [False] * len(before) + [True] * said + [False] * len(after)
        assert (ids[: len(before)], ids[len(before) + said :]) == (before, after)
        assert not set(ids[len(before) : len(before) + said]) & set(target.eos_ids)


def test_a_model_that_scales_its_embeddings_is_refused(checkpoint: CheckpointFactory) -> None:
    other = draft_text.Target(checkpoint("gemma2"))
    with pytest.raises(UserError, match="scales its embeddings or logits"):
        other.look(draft_text.Text([5, 6, 7], [False] * 3, 2, 0.0))


# --- training -----------------------------------------------------------------------------------------


def test_the_loss_by_hand(job: Any) -> None:
    """Against loops: which rows count in which step, and which of the model's tokens."""
    own = [[False, False, True, True, True], [False, False, False, True]]
    texts = [draft_text.Text([0] * len(o), o, 2, 0.0) for o in own]
    draw = torch.Generator().manual_seed(0)
    lm_head, ids = torch.randn(6, 3, generator=draw), torch.tensor([0, 2, 5])
    seen = []
    for text in texts:
        final = torch.randn(len(text.own), 3, generator=draw)
        log_sum = (final @ lm_head.T).logsumexp(-1)
        seen.append(draft_text.Seen(text, torch.zeros(len(final), dtype=torch.long), final, final, log_sum))
    steps = torch.randn(2, 2, 4, 3, generator=draw)  # step, text, row, draft token
    head = SimpleNamespace(target_ids=ids, unroll=lambda *_: iter(steps), own_logits=lambda hidden: hidden)
    target = SimpleNamespace(lm_head=lm_head, embed=None)
    found = job.loss_of(head, target, job.batch_of(seen), 2)
    by_step = []
    for s in range(2):
        losses = []
        for t, each in enumerate(seen):
            for row in range(s, len(each.final) - 2):
                if each.text.own[row + 2]:
                    right = (each.final[row + 1] @ lm_head.T).softmax(-1)[ids]
                    losses.append(-float(right @ steps[s, t, row].log_softmax(-1)))
        by_step.append(sum(losses) / len(losses))
        assert len(losses) == 4 - s
    assert float(found) == pytest.approx((by_step[0] + 0.8 * by_step[1]) / 1.8, rel=1e-5)


def test_the_spread_goes_into_the_weights(job: Any, target: Any) -> None:
    """Without one update: the head on raw hidden states is the one before on scaled ones."""
    texts = draft_text.written_texts(target, draft_text.Wanted("random", 5, 0.7, seed=1), 2)
    seen = [target.look(text) for text in texts]
    ids = torch.arange(10)
    head = job.new_head(target, draft_head.head_config(target.config, 10), ids, seed=0)
    assert torch.equal(head.lm_head.weight, target.lm_head[ids])
    before, recipe = copy.deepcopy(head), job.Recipe(1.0, 0, 1, 2, 1e-3, 0)
    assert job.train(head, target, seen, recipe, print) == []
    spread = job.spread_of(seen)
    assert float(spread.max() / spread.min()) > 1.5
    args = (seen[0].tokens[None, 1:], target.embed, 2)
    with torch.no_grad():
        scaled = before.unroll(seen[0].states[None, :-1] / spread, *args)
        for right, found in zip(scaled, head.unroll(seen[0].states[None, :-1], *args), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_head_is_trained_saved_and_measured(
    job: Any, checkpoint: CheckpointFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few updates: the loss falls, the file loads, and the page says what it accepts."""
    out, path = tmp_path / "head", checkpoint("llama")
    words = [
        "--model",
        path,
        "--out",
        out,
        "--texts",
        24,
        "--held-out",
        8,
        "--max-tokens",
        12,
        "--updates",
        30,
    ]
    assert job.main([*map(str, words), "--draft-vocab", "100", "--text", str(tmp_path / "texts")]) == 0
    told = capsys.readouterr().out
    page = (out / f"train_draft_{path.name}.md").read_text()
    assert page in told
    first, last = (float(word) for word in page.partition("loss ")[2].split(" nats")[0].split(" to "))
    assert last < first
    head = draft_head.Head.read(out)
    assert len(head.d2t) == 100
    rows = [line.split("|")[1:-1] for line in page.splitlines() if "| head |" in line]
    assert [(row[0].strip(), int(row[2])) for row in rows] == [
        (name, k) for name in ("greedy", "temperature 0.7") for k in range(1, 5)
    ]


# --- acceptance ---------------------------------------------------------------------------------------


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    """And the next begins behind the token that the model gave in its place; only whole drafts count."""
    text = draft_text.Text([1, 2, 3, 10, 11, 12, 13, 14, 15], [False] * 3 + [True] * 6, 3, 0.0)
    # Row 2 is behind token 3, the answer's first: rows 2 to 4 are asked for.
    drafts = torch.full((8, 4), -1)
    drafts[2, :2] = torch.tensor([11, 99])
    drafts[4, :2] = torch.tensor([13, 14])
    tally = draft_acceptance.Tally(2)
    tally.add(drafts, text, {(1, 2, 3, 10, 11), (2, 3, 10, 11, 12)})
    assert (tally.num_drafts, dict(tally.accepted), tally.num_seen) == (2, {1: 2, 2: 1}, 1)
    assert (tally.at_least(1), tally.at_least(2), tally.per_draft) == (1.0, 0.5, 1.5)


def test_what_was_learned_from_is_looked_up_with_four_tokens_before() -> None:
    learned = draft_text.Text([1, 2, 3, 10, 11, 9], [True] * 6, 0, 0.0)
    known = draft_acceptance.known_runs([learned])
    assert known == {(1, 2, 3, 10, 11), (2, 3, 10, 11, 9)}
    tally = draft_acceptance.Tally(1)
    tally.add(torch.full((6, 4), -1), draft_text.Text([1, 2, 3, 10, 11, 12], [True] * 6, 3, 0.0), known)
    assert (tally.num_drafts, tally.num_seen, tally.accepted.total()) == (2, 1, 0)


def test_successors_are_of_the_models_own_tokens() -> None:
    own = [False, False, True, True, True, True, True]
    learned = draft_text.Text([4, 4, 5, 6, 5, 6, 7], own, 2, 0.0)
    asked = SimpleNamespace(tokens=torch.tensor([9, 4, 5, 7]))
    drafts = draft_acceptance.successor_drafter([learned])(asked)
    assert drafts.tolist() == [[5, 6, 5, 6], [6, 5, 6, 5], [7, 7, 7, 7]]


def test_a_heads_drafts_lie_in_the_row_they_begin_at(head: Any) -> None:
    embed = nn.Embedding(VOCAB, TARGET.hidden_size)
    states, tokens = torch.randn(10, 3 * TARGET.hidden_size), torch.randint(VOCAB, (10,))
    asked = SimpleNamespace(states=states, tokens=tokens)
    drafts = draft_acceptance.head_drafter(head, SimpleNamespace(embed=embed))(asked)
    assert drafts.shape == (9, 4)
    with torch.no_grad():
        for row in range(6):
            # A text that ends there drafts the same.
            steps = head.unroll(states[None, : row + 4], tokens[None, 1 : row + 5], embed, 4, own=True)
            assert [int(head.best(h)[0, row + s]) for s, h in enumerate(steps)] == drafts[row].tolist()


def test_short_answers_are_refused() -> None:
    seen = SimpleNamespace(text=draft_text.Text([1, 2, 3, 4, 5], [True] * 5, 1, 0.0))
    with pytest.raises(UserError, match="5 tokens"):
        draft_acceptance.tallies(lambda _: torch.zeros(4, 4), [seen], set())
