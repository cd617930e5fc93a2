"""Models by name: fetched once from a hub, which a server on loopback plays, then read from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml

from rayk.actors.tokenizer import load_encoder
from rayk.experiments.planning import plan_experiment
from rayk.explain.explanation import explain_pair
from rayk.models import hub as models_hub
from rayk.models.families import load_config
from rayk.models.hub import config_file, model_folder, pinned
from rayk.models.memory_plan import plan_memory
from rayk.specs import load_spec
from rayk.specs.server_plan import ServerOptions, plan_server
from rayk.types.errors import CheckpointError
from rayk.types.model_names import hub_name, short_name
from tests.conftest import CheckpointFactory
from tests.house import ROOT
from tests.local_hub import NAME, PINNED, UNWANTED, WEIGHTS, LocalHub


def test_a_model_is_fetched_once_and_its_commit_kept(hub: LocalHub) -> None:
    assert pinned(NAME) == PINNED
    folder = model_folder(PINNED)
    assert load_config(folder).family == "qwen3"
    assert hub.fetched() == sorted(p.name for p in folder.iterdir())
    there = {p.name for p in hub.folders[NAME].iterdir() if p.is_file()}
    assert {"tokenizer.json", "chat_template.jinja", "config.json", WEIGHTS} <= there
    assert set(hub.fetched()) == there - set(UNWANTED)
    assert not set(UNWANTED) & {str(p.relative_to(folder)) for p in folder.rglob("*")}
    hub.requests.clear()
    models_hub._pinned_snapshot.cache_clear()
    assert model_folder(PINNED) == folder
    assert hub.requests == []  # a commit never changes
    assert pinned(f"{NAME}@main") == PINNED
    assert hub.fetched() == []


def test_ranks_of_a_node_fetch_once(hub: LocalHub) -> None:
    with ThreadPoolExecutor(4) as ranks:
        folders = set(ranks.map(model_folder, [PINNED] * 4))
    assert len(folders) == 1
    assert hub.fetched().count(WEIGHTS) == 1


def test_a_run_keeps_name_and_commit(hub: LocalHub, checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = str(checkpoint("qwen3"))
    spec = {
        "matrix": {"model": [NAME, folder], "decode.tp": [1, 2]},
        "exclude": [{"model": NAME, "decode.tp": 2}],
        "model": NAME,
        "prompts": {"random": {"count": 2, "input_tokens": [5]}},
    }
    told: list[str] = []
    plan = plan_experiment(load_spec(spec), tmp_path / "out", tell=told.append)
    assert [(cell.prefill.model, cell.decode and cell.decode.tp) for cell, _ in plan.cells] == [
        (PINNED, 1),
        (folder, 1),
        (folder, 2),
    ]
    assert plan.cells[0][0].cell_id == "qwen3-tiny_c0ffee00-p1-d1"
    assert told == [f"model {PINNED}: {model_folder(PINNED)}"]
    assert yaml.safe_load(plan.yaml)["matrix"][0]["model"] == [PINNED, folder]
    assert set(plan.inputs) == {PINNED, folder}
    assert plan.cells[0][1] == plan.cells[1][1]  # the tokenizer's special tokens were found


def test_a_drafter_of_the_hub_is_pinned_too(hub: LocalHub, tmp_path: Path) -> None:
    """Wherever a spec, a server or `rayk explain` names it."""
    folder = str(model_folder(pinned(NAME)))
    drafts = {"method": "draft", "model": NAME}
    spec = {
        "matrix": {"mode": ["aggregated"], "speculative.model": [NAME, folder]},
        "model": folder,
        "speculative": {"method": "draft", "model": NAME},
        "prompts": {"random": {"count": 2, "input_tokens": [5]}},
    }
    told: list[str] = []
    plan = plan_experiment(load_spec(spec), tmp_path / "out", tell=told.append)
    found = [cell.prefill.speculative for cell, _ in plan.cells]
    assert [one and one.model for one in found] == [PINNED, folder]
    assert told == [f"model {PINNED}: {model_folder(PINNED)}"]
    resolved = yaml.safe_load(plan.yaml)
    assert resolved["matrix"][0]["speculative.model"] == [PINNED, folder]
    assert resolved["speculative"]["model"] == PINNED
    assert set(plan.inputs) == {PINNED, folder}
    sides = {"prefill": {"speculative": drafts}, "decode": {"speculative": drafts | {"model": folder}}}
    explained = explain_pair(folder, sides, num_tokens=16)
    assert not explained.left_out, "the same weights, by two names"
    config = json.dumps({"method": "draft_model", "model": NAME, "num_speculative_tokens": 2})
    settings = plan_server(ServerOptions(model=folder, device="cpu", speculative_config=config)).settings
    assert [e.config.speculative and e.config.speculative.model for e in settings.engines] == [PINNED]


def test_the_tokenizer_of_a_name(hub: LocalHub) -> None:
    text = "a text of some tokens"
    assert load_encoder(PINNED)(text) == load_encoder(str(hub.folders[NAME]))(text)


def test_explain_fetches_the_config_alone(hub: LocalHub) -> None:
    settings = {"decode": {"tp": 2}}
    found = explain_pair(NAME, settings)
    assert hub.fetched() == ["config.json"]
    assert found.model == PINNED
    of_folder = explain_pair(str(hub.folders[NAME]), settings)
    assert (found.bytes, found.reads) == (of_folder.bytes, of_folder.reads)


def test_a_memory_plan_fetches_the_config_alone(hub: LocalHub) -> None:
    plan = plan_memory(NAME, "1xH100")
    assert hub.fetched() == ["config.json"]
    assert plan.model == PINNED
    of_folder = plan_memory(hub.folders[NAME], "1xH100")
    assert (plan.fits, plan.num_parameters) == (True, of_folder.num_parameters)


def test_how_older_releases_of_modelopt_are_stored_is_known_by_name_too(hub: LocalHub) -> None:
    said = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (hub.folders[NAME] / "hf_quant_config.json").write_text(json.dumps(said))
    plan = plan_memory(NAME, "1xH100")
    assert hub.fetched() == ["config.json", "hf_quant_config.json"]
    assert plan.stored_as == plan_memory(hub.folders[NAME], "1xH100").stored_as
    assert plan.stored_as.startswith("fp8")


def test_a_server_is_called_by_its_repository(hub: LocalHub) -> None:
    settings = plan_server(ServerOptions(model=NAME, device="cpu")).settings
    assert settings.model.model_id == NAME
    assert settings.model.folder == PINNED  # which every node looks up in its own cache
    assert {e.config.model for e in settings.engines} == {PINNED}


def test_offline_the_cache_will_do_and_a_part_will_not(hub: LocalHub, offline: Callable[[], None]) -> None:
    config_file(NAME)
    hub.requests.clear()
    offline()
    assert config_file(NAME)[0] == PINNED
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set, and a part of it only") as caught:
        pinned(NAME)
    assert "hf download" in caught.value.mend
    with pytest.raises(CheckpointError, match=r"no folder tiny-org/lost here; .* it is not in the cache"):
        pinned("tiny-org/lost")
    assert hub.requests == []


def test_offline_after_it_was_fetched(hub: LocalHub, offline: Callable[[], None]) -> None:
    pinned(NAME)
    hub.requests.clear()
    offline()
    assert pinned(NAME) == PINNED
    assert load_config(model_folder(PINNED)).family == "qwen3"
    assert hub.requests == []


def test_what_the_hub_does_not_give(hub: LocalHub) -> None:
    with pytest.raises(CheckpointError, match=r"no folder tiny-org/lost here, and no model of that name"):
        pinned("tiny-org/lost")
    with pytest.raises(CheckpointError, match="no revision v9"):
        pinned(f"{NAME}@v9")
    hub.gated.add(NAME)
    with pytest.raises(CheckpointError, match="gated") as caught:
        pinned(NAME)
    assert f"{hub.url}/{NAME}" in caught.value.mend


def test_pickled_weights_are_not_fetched(hub: LocalHub) -> None:
    (hub.folders[NAME] / WEIGHTS).unlink()
    (hub.folders[NAME] / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no .safetensors weights \(only pytorch_model.bin\)"):
        pinned(NAME)
    assert not [name for name in hub.fetched() if ".bin" in name]


def test_a_token_is_shown_to_the_hub(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens[NAME] = "hf_secret"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(CheckpointError, match="may be read") as caught:
        config_file(NAME)
    assert "HF_TOKEN" in caught.value.mend
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert config_file(NAME)[0] == PINNED
    assert "Bearer hf_secret" in hub.authorizations


def test_a_hub_that_is_not_there(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for action in (pinned, config_file):
        with pytest.raises(
            CheckpointError, match="127.0.0.1:9 cannot be reached, and it is not in the cache"
        ):
            action(NAME)
    assert waits == []  # huggingface_hub sleeps between tries, 23 s in all


def test_a_repository_without_a_config(hub: LocalHub) -> None:
    (hub.folders[NAME] / "config.json").unlink()
    for action in (pinned, config_file):
        with pytest.raises(CheckpointError, match=r"the repository has no config\.json"):
            action(NAME)


def test_what_is_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(hub_name("org/model")) == "org/model"
    (tmp_path / "org" / "there").mkdir(parents=True)
    assert hub_name("org/there") is None
    assert hub_name("org/model") is None  # a folder that is missing: org/ is here
    assert str(hub_name("org/model@main")) == "org/model@main"
    for path in ("model", "./org2/model", "/org2/model", "../org2/model", "a/b/c", "org2/", "~/model", ""):
        assert hub_name(path) is None, path
    assert model_folder("org/there") == Path("org/there")
    assert pinned("org/there") == "org/there"


def test_short_names() -> None:
    assert short_name("checkpoints/qwen3-tiny") == "qwen3-tiny"
    assert short_name("/data/Qwen/Qwen3-0.6B/") == "Qwen3-0.6B"
    assert short_name(PINNED) == "qwen3-tiny@c0ffee00"
    assert short_name("org/model@refs/pr/1") == "model@refs-pr-1"


def test_folders_need_no_hub(checkpoint: CheckpointFactory) -> None:
    """The package is not even imported."""
    script = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from rayk.explain.explanation import explain_pair\n"
        f"print(explain_pair({str(checkpoint('qwen3'))!r}, {{}}).supported)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_command_reads_the_hubs_own_variables(hub: LocalHub, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "rayk.cli.main", "explain", "--model", NAME, "--format", "json"]

    def explain(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment | more, capture_output=True, text=True, check=False
        )

    first = explain()
    assert json.loads(first.stdout)["model"] == PINNED, first.stderr
    assert (tmp_path / "home" / "hub").is_dir()
    again = explain(HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout
    elsewhere = explain(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other"))
    assert elsewhere.returncode == 2
    assert "HF_HUB_OFFLINE is set, and it is not in the cache" in elsewhere.stderr
    assert "mend: fetch it once with a network" in elsewhere.stderr
