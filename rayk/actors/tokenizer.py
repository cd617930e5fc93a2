"""Text to token ids and back with the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from rayk.models.hub import model_folder
from rayk.types.errors import CheckpointError
from rayk.types.files import JSON_BYTES


def load_encoder(model: str) -> Callable[[str], list[int]]:
    """Load the tokenizer's default encoding. Raises CheckpointError when the folder has none."""
    tokenizer = load_tokenizer(model, "give prompts as token ids")
    return lambda text: [int(i) for i in tokenizer(text)["input_ids"]]


def load_decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Load a decoder of token ids to text without special tokens. Longer inputs only add to the text of
    shorter ones that end with a whole character. Raises CheckpointError when the folder has no usable
    tokenizer."""
    tokenizer = load_tokenizer(model, "give stop_token_ids instead of stop strings")

    def decode(token_ids: Sequence[int]) -> str:
        # Cleaning up would take back spaces that were text already.
        text: str = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def load_vocabulary(model: str) -> str:
    """Read the tokenizer in the form of tokenizer.json, with what else its folder adds to it. Raises
    CheckpointError when the folder has none, or one that is not of that form."""
    mend = "no structured outputs"
    fast = getattr(load_tokenizer(model, mend), "backend_tokenizer", None)
    if fast is None:
        raise CheckpointError("the tokenizer has no form of tokenizer.json", where=model, mend=mend)
    fast = copy(fast)
    fast.no_padding()
    fast.no_truncation()
    return str(fast.to_str())


def _check_files(folder: Path, mend: str) -> None:
    """Raise CheckpointError for a file that can be read for ever: transformers would try."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not path.is_dir() and not path.is_file():
            raise CheckpointError("not a plain file", where=str(path), mend=mend)
        if path.name.startswith("tokenizer") and path.is_file() and path.stat().st_size > JSON_BYTES:
            raise CheckpointError(f"more than {JSON_BYTES:,} bytes", where=str(path), mend=mend)


def load_tokenizer(model: str, mend: str) -> Any:
    """Load a model's own tokenizer, through transformers. Raises CheckpointError when none is usable."""
    from transformers import AutoTokenizer

    folder = model_folder(model)
    _check_files(folder, mend)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - of a damaged tokenizer.json: KeyError, Exception itself
        raise CheckpointError(
            f"cannot load a tokenizer: {type(error).__name__}: {error}".splitlines()[0],
            where=model,
            mend=mend,
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # What transformers makes of a folder without a tokenizer's files.
        raise CheckpointError("there is no tokenizer", where=model, mend=mend)
    return tokenizer
