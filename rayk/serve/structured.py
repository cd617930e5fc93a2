"""From the fields in which clients ask for a form to what engines are asked; refused before anything runs."""

from __future__ import annotations

from dataclasses import replace

from rayk.serve.errors import ApiError
from rayk.serve.protocol import Generation, ResponseFormat, StructuredFields
from rayk.serve.request_parsing import Front
from rayk.types.errors import UserError
from rayk.types.structured import StructuredOutputs, schema_text

UNSUPPORTED = {
    "whitespace_pattern": "disable_any_whitespace",
    "disable_additional_properties": "additionalProperties: false in the schema",
    "structural_tag": "grammar",
}
"""Fields of vLLM's structured_outputs that are refused -> what to write in their place."""
SCHEMA = "response_format.json_schema.schema"
"""Where OpenAI's clients write their schema."""


async def form_of(front: Front, body: Generation) -> StructuredOutputs | None:
    """Find and check the form that a client asks for; None: any. Raises ApiError."""
    asked, given = body.response_format, body.structured_outputs
    wanted, where = None, "structured_outputs"
    if asked is not None and asked.type != "text":
        if given is not None:
            problem = "response_format and structured_outputs both ask for a form: give one of them"
            raise ApiError(400, problem, param="structured_outputs", code="invalid_value")
        wanted, where = _of_format(asked), "response_format"
    elif given is not None:
        wanted = _of_fields(given)
    if wanted is not None:
        await check_form(front, wanted, where)
    return wanted


async def check_form(front: Front, wanted: StructuredOutputs, param: str) -> None:
    """Refuse what no engine would take; `param` names the field that asked for it. Raises ApiError."""
    front.need_text()
    try:
        await front.grammars.run(front.forms.check, wanted)
    except UserError as error:
        if param == "response_format":
            error = replace(error, where=SCHEMA)
        elif param != "structured_outputs":
            error = replace(error, where=param)
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _of_format(asked: ResponseFormat) -> StructuredOutputs:
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.json_schema is None or asked.json_schema.json_schema is None:
        problem = f"response_format: type json_schema needs {SCHEMA}"
        raise ApiError(400, problem, param="response_format", code="invalid_value")
    return StructuredOutputs(json=schema_text(asked.json_schema.json_schema))


def _of_fields(given: StructuredFields) -> StructuredOutputs:
    for name, value in (given.model_extra or {}).items():
        if value is not None and value is not False:
            mend = f"; use {UNSUPPORTED[name]}" if name in UNSUPPORTED else ""
            problem = f"structured_outputs.{name[:100]} is not supported{mend}"
            raise ApiError(400, problem, param="structured_outputs", code="unsupported_parameter")
    schema = given.json_schema
    return StructuredOutputs(
        json=None if schema is None else schema_text(schema),
        json_object=bool(given.json_object),
        regex=given.regex,
        choice=tuple(given.choice or ()),
        grammar=given.grammar,
        disable_any_whitespace=bool(given.disable_any_whitespace),
    )
