"""vLLM's --speculative-config by rayk's own names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rayk.types.errors import SpecError, shortened
from rayk.types.files import parse_json
from rayk.types.speculative import METHODS

OPTION = "--speculative-config"
_EXAMPLE = """'{"method": "ngram", "num_speculative_tokens": 4}'"""
_KEYS = {
    "method": "method",
    "model": "model",
    "num_speculative_tokens": "num_tokens",
    "draft_tensor_parallel_size": "tp",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
}
"""vLLM's keys -> those of a spec's section `speculative`."""
_METHODS = {"draft_model": "draft", **{name: name for name in METHODS if name != "draft"}}
"""vLLM's methods -> rayk's. Its names of single models' MTP layers (deepseek_mtp) are mtp."""
_NOT_TAKEN = {
    "rejection_sample_method": "`accept: match` or `rejection` of the section says when a draft counts",
    "draft_sample_method": "`accept: match` or `rejection` of the section says when a draft counts",
    "quantization": "a drafter's weights are as in its checkpoint",
    "max_model_len": "a drafter has the model's positions",
    "enforce_eager": "engine.cuda_graphs is for the drafter, too",
    "attention_backend": "engine.attention_backend is for the drafter, too",
    "kv_cache_dtype": "kv_dtype is for the drafter, too",
    "revision": "write model: org/name@revision",
}
"""Keys of vLLM's that rayk has no setting for -> what holds instead."""


def draft_settings(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read vLLM's option, a JSON object or a mapping: keys of the section `speculative` and their values,
    which whoever sets them checks. Raises SpecError for other keys and methods, with rayk's own."""
    found = _parsed(given) if isinstance(given, str) else dict(given)
    where = f"{OPTION} {shortened(json.dumps(found, default=str), 200)}"
    for key in found:
        if key in _NOT_TAKEN:
            raise SpecError(f"{key} is not taken", where=where, mend=f"leave it out: {_NOT_TAKEN[key]}")
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), [*_KEYS, *_KEYS.values()], n=1, cutoff=0.5)
            meant = next((name for name, own in _KEYS.items() if close and close[0] in (name, own)), None)
            mend = f"did you mean {meant!r}?" if meant else f"one of {', '.join(_KEYS)}"
            raise SpecError(f"no key {key!r}", where=where, mend=mend)
    method = found.get("method")
    if method is None:
        raise SpecError("no method is named", where=where, mend=f"a method: {', '.join(_METHODS)}")
    own = "mtp" if str(method).endswith("_mtp") else _METHODS.get(str(method))
    if own is None:
        raise SpecError(f"no method {method!r}", where=where, mend=f"one of {', '.join(_METHODS)}")
    lookup = [found.get(f"prompt_lookup_{end}") for end in ("max", "min")]
    if (lookup[0] is None) != (lookup[1] is None):
        # As in vLLM: one of them alone is both.
        both = next(size for size in lookup if size is not None)
        found |= {"prompt_lookup_max": both, "prompt_lookup_min": both}
    return {
        _KEYS[key]: own if key == "method" else value for key, value in found.items() if value is not None
    }


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        where = f"{OPTION} {shortened(text, 200)}"
        raise SpecError(f"not JSON: {error}", where=where, mend=_EXAMPLE) from error
    if not isinstance(found, dict):
        raise SpecError("not an object", where=f"{OPTION} {shortened(text, 200)}", mend=_EXAMPLE)
    return found
