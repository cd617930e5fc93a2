"""Models by name: what the Hugging Face hub has of them, in this node's cache. Free of torch.

huggingface_hub heeds HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT, shows progress on a terminal, and
goes on where a connection broke. It is imported for names alone: folders need none of it. Of a repository
only what rayk reads is fetched, and never weights that are pickles. Nothing is taken that arrived otherwise
than the hub has it: the cache calls files by their hashes, so these are compared once, after the download.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rayk.types.errors import CheckpointError
from rayk.types.files import write_atomically
from rayk.types.model_names import CONFIG, HubName, hub_name
from rayk.types.noted_hashes import file_sha256

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Weights and their index, configs, and the files of every kind of tokenizer."""
UNWANTED = ("*/*", "consolidated*", "*.bin.index.json")
"""Copies in other formats: in folders of their own, or the same weights under the maker's names."""
QUANT_CONFIG = "hf_quant_config.json"
"""Where nvidia-modelopt's older exports alone say how weights are stored."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
KEPT = "files that arrived whole are kept"
HASHERS = 8
"""Files that are hashed at once: a core hashes about as fast as a good network brings."""
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)


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
    """Fetch config.json of a model of the hub alone, and what says beside it how weights are stored. Returns
    the pinned name and the file; of a folder, or a file, itself. Raises CheckpointError."""
    name = hub_name(model)
    if name is None:
        return str(model), Path(model)
    with _in_words(name):
        # As part of a snapshot: asked for one file, huggingface_hub tries an unreachable hub for 24 s.
        folder = _fetched(name, CONFIG, QUANT_CONFIG)
        file = folder / CONFIG
        if not file.is_file():
            _say_what_lacks(name, folder)
        _refuse_wrong((p for p in (file, folder / QUANT_CONFIG) if p.is_file()), name)
    return f"{name.repo}@{folder.name}", file


@functools.lru_cache
def _pinned_snapshot(name: HubName) -> Path:
    """Ask once: a commit does not change."""
    return _snapshot(name)


def _snapshot(name: HubName) -> Path:
    with _in_words(name), _alone(name), _trusted(name) as before:
        folder = _fetched(name, *WANTED)
        _refuse_wrong((p for p in folder.iterdir() if p.resolve().name not in before), name)
        if not (folder / CONFIG).is_file() or not any(folder.glob("*.safetensors")):
            _say_what_lacks(name, folder)
    return folder


def _fetched(name: HubName, *wanted: str) -> Path:
    """Return the folder of the cache that has what the repository has of the patterns `wanted`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """Is shown on terminals alone."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{"disable": None} | options)  # type: ignore[no-untyped-call]

    folder = snapshot_download(
        name.repo,
        revision=name.revision,
        allow_patterns=[*wanted],
        ignore_patterns=[*UNWANTED],
        tqdm_class=Bar,
    )
    return Path(folder)


def _cache_folders(name: HubName) -> tuple[Path, Path]:
    """Return where the cache has a repository, and where it has locks of it."""
    from huggingface_hub import constants

    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{name.repo.replace('/', '--')}"
    return cache / folder, cache / ".locks" / folder


@contextmanager
def _alone(name: HubName) -> Iterator[None]:
    """Keep others of this node that want the repository waiting: one fetches and hashes it. Where none may
    write nobody is kept: what is there is whole, or cannot be fetched."""
    from huggingface_hub import constants

    _, locks = _cache_folders(name)
    with ExitStack() as stack:
        if not constants.is_offline_mode():
            with suppress(OSError):
                locks.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context((locks / "rayk.lock").open("w")), fcntl.LOCK_EX)
        yield


@contextmanager
def _trusted(name: HubName) -> Iterator[frozenset[str]]:
    """Yield the names of the files in the cache that need no hashing: those that were there before. They are
    noted until the others are hashed, so that what a killed process fetched is not taken for one of them."""
    from huggingface_hub import constants

    cache, locks = _cache_folders(name)
    blobs, note = cache / "blobs", locks / "rayk.trusted"
    try:
        trusted = frozenset(note.read_text().split())
    except OSError:
        trusted = frozenset(p.name for p in blobs.iterdir()) if blobs.is_dir() else frozenset()
        if not constants.is_offline_mode():
            with suppress(OSError):
                write_atomically(note, "\n".join(trusted))
    yield trusted
    if not constants.is_offline_mode():
        with suppress(OSError):
            note.unlink()


def _refuse_wrong(files: Iterable[Path], name: HubName) -> None:
    """Remove from the cache what is not what its name there says: a large file's SHA-256, else git's hash.
    Raises CheckpointError."""
    files = list(files)
    with ThreadPoolExecutor(HASHERS) as threads:
        is_right = list(threads.map(_is_what_it_is_called, [p.resolve() for p in files]))
    wrong = [p for p, right in zip(files, is_right, strict=True) if not right]
    for file in wrong:
        file.resolve().unlink()
    if wrong:
        raise CheckpointError(
            f"{', '.join(p.name for p in wrong)}: not what the hub has, by the hash; removed again",
            where=str(name),
            mend="the same command once more; if it stays so, look at what stands between here and the hub",
        )


def _is_what_it_is_called(blob: Path) -> bool:
    """Whether a file's hash is its name; true of a name that is no hash."""
    is_hash = set(blob.name) <= set("0123456789abcdef")
    if is_hash and len(blob.name) == 64:
        return file_sha256(blob) == blob.name
    if is_hash and len(blob.name) == 40:
        data = blob.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == blob.name
    return True


def _say_what_lacks(name: HubName, folder: Path) -> NoReturn:
    """Raise CheckpointError for a snapshot that is no checkpoint: by the hub, or in the cache alone."""
    from huggingface_hub import HfApi

    files = sorted(HfApi().list_repo_files(name.repo, revision=folder.name))
    what = CONFIG if CONFIG not in files else ".safetensors weights"
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
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # OSError, and what its HTTP library raises, httpx's or another's
        raise _as_checkpoint_error(name, error) from error


def _as_checkpoint_error(name: HubName, error: Exception) -> CheckpointError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        refusal = error.__cause__  # the hub was reached, but was not willing
        return _refused(name, refusal) if isinstance(refusal, errors.HfHubHTTPError) else _not_in_cache(name)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(name, error)
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"no name of a model: {error}", where=str(name))
    if getattr(error, "errno", None) in DISK_IS_FULL + CANNOT_WRITE:
        problem = f"the cache {constants.HF_HUB_CACHE} takes no more: {getattr(error, 'strerror', error)}"
        mend = f"make room, or HF_HOME=... where there is some; {KEPT}"
    else:
        problem = f"cannot be fetched from {hub}: {type(error).__name__}: {error}".splitlines()[0]
        mend = f"see that {hub} is reached, then the same command: {KEPT}"
    return CheckpointError(problem, where=str(name), mend=mend)


def _refused(name: HubName, error: Any) -> CheckpointError:
    """`error`: HfHubHTTPError, whose kind or status says why the hub gives nothing."""
    from huggingface_hub import constants, errors

    hub, status = constants.ENDPOINT, error.response.status_code
    token = "HF_TOKEN=... on every node (or `hf auth login`)"
    if isinstance(error, errors.GatedRepoError):
        problem = f"the repository is gated: {hub} gives it to those who accepted its terms"
        mend = f"accept them at {hub}/{name.repo}, then {token}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"there is no folder {name.repo} here, and no model of that name on {hub} that may be read"
        mend = f"check both; for a private one {token}"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"the repository has no revision {name.revision}"
        mend = f"a branch, tag or commit of {hub}/{name.repo}"
    elif isinstance(error, errors.EntryNotFoundError):
        problem, mend = "the repository has no config.json", "a repository in Hugging Face format"
    elif status in (401, 403):
        problem = f"{hub} does not accept the token it was shown ({status})"
        mend = f"one that is valid and may read this repository: {token}"
    else:
        problem = f"{hub} answers with HTTP status {status}"
        mend = f"the same command later: {KEPT}"
    return CheckpointError(problem, where=str(name), mend=mend)


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
