"""Text to token ids with the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from rayk.types.errors import CheckpointError


def load_encoder(model: str) -> Callable[[str], list[int]]:
    """The tokenizer's default encoding. Raises CheckpointError when the folder has no usable tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load a tokenizer: {error}".splitlines()[0], where=model, mend="give prompts as token ids"
        ) from error
    return lambda text: [int(i) for i in tokenizer(text)["input_ids"]]
