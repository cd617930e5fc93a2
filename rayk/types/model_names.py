"""How a model is named: by a checkpoint's folder, or by its name on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.json"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN = 8  # digits of a commit that tell it apart for people


@dataclass(frozen=True, slots=True)
class HubName:
    """`repo@revision` of the hub: Qwen/Qwen3-0.6B@main."""

    repo: str
    revision: str | None
    """A branch, tag or commit; None: the newest."""

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def hub_name(model: str | Path) -> HubName | None:
    """Read a model's name on the hub; None of a folder, there or not.

    What exists here always wins. Where `checkpoints/` is a folder here, `checkpoints/lost` is one that is
    missing: a mistyped path is not looked up elsewhere. A name with a revision (org/name@main) is one anyhow.
    """
    found = _NAME.fullmatch(str(model))
    if found is None or Path(model).exists():
        return None
    if found["revision"] is None and Path(model).parent.is_dir():
        return None
    return HubName(found["repo"], found["revision"])


def short_name(model: str) -> str:
    """Return what people call a model: its folder's name, or what follows the organisation, with the
    beginning of the commit if it has one."""
    found = _NAME.fullmatch(model)
    if found is None or found["revision"] is None:
        return Path(model).name
    revision = found["revision"]
    shown = revision[:_SHOWN] if _COMMIT.fullmatch(revision) else revision.replace("/", "-")
    return f"{Path(found['repo']).name}@{shown}"


def weights_name(model: str) -> str:
    """Name what has a model's weights: the folder, where its config.json is named, as plans may."""
    path = Path(model)
    return str(path.parent) if path.name == CONFIG else model
