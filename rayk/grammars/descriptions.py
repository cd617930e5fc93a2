"""From what a client asks for to the library's grammars, and what is wrong with it."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from rayk.types.errors import UserError
from rayk.types.structured import MAX_STRUCTURE_CHARACTERS, StructuredOutputs

if TYPE_CHECKING:
    from types import ModuleType

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000
"""States of expressions that one output may come through, of 1 to 2 KB each."""
COMPILE_FUEL = 100_000
"""Steps in which the library looks at an expression ahead of an output: a tenth of a second. It looks at what
these do not reach when an output comes there."""
MAX_CHOICES = 1000
_SHOWN = 300
"""So many characters of the library's complaint are told."""
_SCHEMA_MEND = "a JSON schema of the keywords that docs/serving.md names"
_MENDS = {
    "json": _SCHEMA_MEND,
    "json_object": _SCHEMA_MEND,
    "regex": "a regular expression of Rust's syntax, which has no look-around and no back-references",
    "choice": f"1 to {MAX_CHOICES} texts, none of them empty",
    "grammar": "a grammar of Lark's or GBNF's syntax, whose first rule is start or root",
}


def library() -> ModuleType:
    """Import llguidance. Raises UserError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise UserError(
            f"structured output needs the package llguidance: {error}", mend="pip install llguidance"
        ) from error
    return llguidance


def check(wanted: StructuredOutputs) -> None:
    """Refuse a description that no engine would take, or that no text fits, without a vocabulary. What
    that takes is not bounded: descriptions of strangers are checked in processes that are. Raises UserError,
    which says where and how to mend it."""
    problem = _problem(wanted)
    if problem is not None:
        raise problem


@lru_cache(maxsize=64)
def _problem(wanted: StructuredOutputs) -> UserError | None:
    try:
        check_start(wanted, make_matcher(wanted, _bytes_tokenizer()))
    except UserError as error:
        return error
    return None


def make_matcher(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a description; what is wrong with it shows in the matcher's error. Raises UserError for what
    is refused before that."""
    llguidance = library()
    matcher: LLMatcher = llguidance.LLMatcher(tokenizer, _source(wanted), log_level=0, limits=_limits())
    return matcher


def check_start(wanted: StructuredOutputs, matcher: LLMatcher) -> None:
    """Find out whether a new matcher knows a first token. Raises UserError."""
    started = matcher.deep_copy()
    if not started.is_error():
        started.compute_bitmask()
    if started.is_error():
        raise refusal(wanted, in_words(started.get_error()))


def in_words(complaint: str) -> str:
    """Shorten the library's complaint to what a client can use."""
    if complaint.startswith("NoExtension"):
        return "no text fits it"
    if complaint.startswith("panic"):
        return "it cannot be compiled"
    text = complaint.removesuffix("\n<non-verbose/>").strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def refusal(wanted: StructuredOutputs, problem: str) -> UserError:
    """Make the error that says what is wrong with a description, which asks for one thing."""
    (kind,) = wanted.kinds
    return UserError(problem, where=f"structured_outputs.{kind}", mend=_MENDS[kind])


@cache
def _limits() -> LLParserLimits:
    limits: LLParserLimits = library().LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=COMPILE_FUEL, verbose_errors=False
    )
    return limits


def _source(wanted: StructuredOutputs) -> str:
    """Write a description as the library's own grammar. Raises UserError."""
    _check_shape(wanted)
    llguidance = library()
    if wanted.json is not None or wanted.json_object:
        schema = '{"type": "object"}' if wanted.json is None else wanted.json
        return _of_schema(wanted, schema)
    try:
        if wanted.regex is not None:
            return str(llguidance.LLMatcher.grammar_from_regex(wanted.regex))
        if wanted.choice:
            return str(llguidance.grammar_from("choice", json.dumps(wanted.choice)))
        assert wanted.grammar is not None, "one field asks for something"
        return str(llguidance.grammar_from("grammar", wanted.grammar))
    except ValueError as error:
        raise refusal(wanted, in_words(str(error))) from None


def _of_schema(wanted: StructuredOutputs, schema: str) -> str:
    # A schema could set the compiler's options itself: lenient, it ignores keywords that it does not know.
    options = {"whitespace_flexible": not wanted.disable_any_whitespace, "lenient": False}
    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, dict) and parsed is not True:
            raise refusal(wanted, "a schema that something fits is an object, or true")
        text = "{}" if parsed is True else schema
        return str(library().LLMatcher.grammar_from_json_schema(text, overrides=options))
    except (ValueError, RecursionError) as error:
        raise refusal(wanted, f"no JSON: {error}") from None


def _check_shape(wanted: StructuredOutputs) -> None:
    kinds = wanted.kinds
    if len(kinds) != 1:
        found = " and ".join(kinds) or "nothing"
        raise UserError(
            f"it asks for {found}",
            where="structured_outputs",
            mend="one of json, json_object, regex, choice, grammar",
        )
    if wanted.num_characters > MAX_STRUCTURE_CHARACTERS:
        problem = f"{wanted.num_characters} characters are more than {MAX_STRUCTURE_CHARACTERS}"
        raise refusal(wanted, problem)
    if wanted.choice and (len(wanted.choice) > MAX_CHOICES or not all(wanted.choice)):
        raise refusal(wanted, f"{len(wanted.choice)} texts, or an empty one")


@cache
def _bytes_tokenizer() -> LLTokenizer:
    """Make a vocabulary of single bytes and one end: what fits it fits any."""
    llguidance = library()
    tokenizer: LLTokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    return tokenizer


class _Bytes:
    """Spells text in bytes: token b is byte b."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([b]) for b in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
