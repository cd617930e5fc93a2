"""Models by name: what the Hugging Face hub has of them, in this node's cache. Free of torch.

huggingface_hub heeds HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT, shows progress on stderr, and has
processes of a node that want one file wait for the first. It is imported for names alone: folders need none
of it. Of a repository only what rayk reads is fetched, and never weights that are pickles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rayk.types.errors import CheckpointError
from rayk.types.model_names import HubName, hub_name

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Weights and their index, configs, and the files of every kind of tokenizer."""
UNWANTED = ("*/*", "consolidated*", "*.bin.index.json")
"""Copies in other formats: in folders of their own, or the same weights under the maker's names."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def pinned(model: str | Path) -> str:
    """Return a name that means the same everywhere from now on: a folder's as it is, the hub's as
    `org/name@commit`, which this node has then. Raises CheckpointError."""
    name = hub_name(model)
    if name is None:
        return str(model)
    return f"{name.repo}@{_snapshot(name).name}"


def model_folder(model: str | Path) -> Path:
    """Find the folder of a model, as `pinned` named it, on this node, fetching what its cache lacks. Raises
    CheckpointError for a name that the hub, or without it the cache, does not know; a folder may be
    missing."""
    name = hub_name(model)
    return _pinned_snapshot(name) if name is not None and name.is_pinned else Path(model)


def config_file(model: str | Path) -> tuple[str, Path]:
    """Fetch config.json of a model of the hub alone. Returns the pinned name and the file; of a folder, or a
    file, itself. Raises CheckpointError."""
    name = hub_name(model)
    if name is None:
        return str(model), Path(model)
    from huggingface_hub import hf_hub_download

    with _in_words(name):
        file = Path(hf_hub_download(name.repo, "config.json", revision=name.revision))
    return f"{name.repo}@{file.parent.name}", file


@functools.lru_cache
def _pinned_snapshot(name: HubName) -> Path:
    """Ask once: a commit does not change."""
    return _snapshot(name)


def _snapshot(name: HubName) -> Path:
    from huggingface_hub import snapshot_download

    with _in_words(name):
        folder = Path(
            snapshot_download(
                name.repo, revision=name.revision, allow_patterns=[*WANTED], ignore_patterns=[*UNWANTED]
            )
        )
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            _say_what_lacks(name, folder)
    return folder


def _say_what_lacks(name: HubName, folder: Path) -> NoReturn:
    """Raise CheckpointError for a snapshot that is no checkpoint: by the hub, or in the cache alone."""
    from huggingface_hub import HfApi

    files = sorted(HfApi().list_repo_files(name.repo, revision=folder.name))
    what = "config.json" if "config.json" not in files else ".safetensors weights"
    pickles = [file for file in files if file.endswith(PICKLES)]
    only = f" (only {', '.join(pickles[:3])})" if pickles else ""
    raise CheckpointError(
        f"the repository has no {what}{only}",
        where=str(name),
        mend="a revision that has them, e.g. @refs/pr/1 where the hub's bot made some; or load and save it "
        "with transformers, then pass the folder",
    )


@contextmanager
def _in_words(name: HubName) -> Iterator[None]:
    """Turn what huggingface_hub raises into CheckpointError."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"the repository is gated: {hub} gives it to those who accepted its terms",
            where=str(name),
            mend=f"accept them at {hub}/{name.repo}, then HF_TOKEN=... on every node (or `hf auth login`)",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {name.repo} here, and no model of that name on {hub} that may be read",
            where=str(name),
            mend="check both; for a private one HF_TOKEN=... on every node (or `hf auth login`)",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"the repository has no revision {name.revision}",
            where=str(name),
            mend=f"a branch, tag or commit of {hub}/{name.repo}",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _not_in_cache(name) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(
            "the repository has no config.json", where=str(name), mend="a repository in Hugging Face format"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"no name of a model: {error}", where=str(name)) from error
    except CheckpointError:
        raise
    except Exception as error:  # OSError, and what its HTTP library raises, httpx's or another's
        raise CheckpointError(
            f"cannot be fetched from {hub}: {type(error).__name__}: {error}".splitlines()[0],
            where=str(name),
            mend=f"see that {hub} is reached, and that {constants.HF_HUB_CACHE} has room",
        ) from error


def _not_in_cache(name: HubName) -> CheckpointError:
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    how_much = "a part of it only is" if isinstance(cached, str) else "it is not"
    hub = constants.ENDPOINT
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{hub} cannot be reached"
    return CheckpointError(
        f"there is no folder {name.repo} here; {why}, and {how_much} in the cache {constants.HF_HUB_CACHE}",
        where=str(name),
        mend=f"fetch it once with a network (`hf download {name.repo}`), or copy the cache here; see HF_HOME",
    )
