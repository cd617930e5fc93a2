"""Answers of a form for jobs/serve_stress.py: what they are asked with, what the same engine says aggregated,
and what they are worth to a judge of schemas alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jobs.stress_load import Met
from rayk.bench.client import ABORTED, OK, TIMEOUT

_NAME = {"type": "string", "maxLength": 8}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name=_NAME, age=_COUNT, kind={"enum": ["a", "b", None]}),
    {"type": "array", "items": _object(x=_COUNT, ok={"type": "boolean"}), "minItems": 1, "maxItems": 3},
    _object(code={"type": "string", "pattern": "^[A-F]{2}-[0-9]{3}$"}, next={"anyOf": [_NAME, _COUNT]}),
)
"""Every prompt has one of them, in turn."""


def fields_of(prompt_index: int) -> dict[str, Any]:
    """What its request has beside the prompt."""
    return {"structured_outputs": {"json": schema_of(prompt_index), "disable_any_whitespace": True}}


def schema_of(prompt_index: int) -> dict[str, Any]:
    return SCHEMAS[prompt_index % len(SCHEMAS)]


def aggregated(folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """What one engine of TP 1 says to the prompts, in their forms."""
    from rayk.actors.tokenizer import load_vocabulary
    from rayk.engine.build import ThreadEngine
    from rayk.types.config import EngineConfig
    from rayk.types.request import Request, SamplingParams
    from rayk.types.structured import StructuredOutputs

    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                structured_outputs=StructuredOutputs(
                    json=json.dumps(schema_of(i)), disable_any_whitespace=True
                ),
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    config = EngineConfig(model=str(folder), num_blocks=1024)
    with ThreadEngine(config, load_vocabulary=partial(load_vocabulary, str(folder))) as engine:
        found = engine.generate(requests)
    for done in found:
        if done.error is not None:
            raise done.error
    return [tuple(done.token_ids) for done in found]


def judge_form(met: Met, expected: Sequence[int], decode: Any) -> tuple[str, str]:
    """One of VERDICTS, as stress_load.judge: tokens are those of the aggregated engine, without near ties,
    and whole answers fit their schema."""
    import jsonschema

    seen, found = met.observed, list(met.observed.output_token_ids)
    is_whole = seen.outcome == OK
    wanted = list(expected[: met.case.max_tokens if is_whole else len(found)])
    if found != wanted:
        at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
        return "wrong", f"token {at} is not the aggregated engine's"
    if seen.outcome == TIMEOUT:
        return "hung", seen.error or ""
    if not is_whole:
        return ("left", "") if seen.outcome == ABORTED else ("failed", seen.error or "")
    if len(expected) <= met.case.max_tokens:
        try:
            jsonschema.validate(json.loads(decode(found)), schema_of(met.case.prompt_index))
        except (ValueError, jsonschema.ValidationError) as error:
            return "wrong", f"no answer of its form: {error}".splitlines()[0]
    return "right", ""
