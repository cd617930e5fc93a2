"""Masks against a judge that knows no grammar: is there a text of the form that begins so? Every text of a
small language is listed, or Python's own `re`, `json` and `jsonschema` say what belongs to it."""

from __future__ import annotations

import functools
import json
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rayk.grammars import Grammars, OutputGrammar, check
from rayk.oracle.tokenizer import build_tokenizer
from rayk.types.errors import UserError
from rayk.types.structured import MAX_STRUCTURE_CHARACTERS, StructuredOutputs
from tests.markers import thorough

EOS = 1
MORE_LOGITS = 7
"""Models may know more ids than their tokenizer."""


def byte_level(vocab_size: int) -> tuple[str, list[bytes]]:
    """The checkpoints' kind -> its file, and each token's bytes; none for special ones."""
    fast = build_tokenizer(vocab_size, adds_bos=True).backend_tokenizer
    alphabet = _alphabet()
    names = [fast.id_to_token(i) for i in range(vocab_size)]
    specials = set(fast.get_added_tokens_decoder())
    return fast.to_str(), [
        b"" if i in specials else bytes(alphabet[c] for c in name) for i, name in enumerate(names)
    ]


def sentence_pieces() -> tuple[str, list[bytes]]:
    """Llama 2's kind: `▁` for spaces, bytes where there is no piece."""
    texts = ["▁", "a", "b", "ab", "▁ab", "tr", "ue", "true", "false", "{", "}", '"', '":', "1", "12", "ö"]
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *texts]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    spelled = [t.replace("▁", " ").encode() for t in texts]
    return tokenizer.to_str(), [b"", b"", *(bytes([b]) for b in range(256)), *spelled]


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


VOCABULARIES: dict[str, Callable[[], tuple[str, list[bytes]]]] = {
    "bytes": functools.partial(byte_level, 259),
    "bpe": functools.partial(byte_level, 1024),
    "pieces": sentence_pieces,
}


@functools.cache
def vocabulary(name: str) -> tuple[Grammars, list[bytes]]:
    text, tokens = VOCABULARIES[name]()
    return Grammars(lambda: text, len(tokens) + MORE_LOGITS, {EOS}), tokens


def allowed(output: OutputGrammar) -> list[int]:
    words = output.mask()
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


WORDS = ("true", "trust", "ab ab", "ab", "a", "falsé", "12", 'say "ö"\n', "{}", "\u2028\\d")
PAIRS = tuple(
    "".join(parts) + tail
    for n in (1, 2, 3)
    for parts in product(("ab", "12"), repeat=n)
    for tail in ("", " true", " trust")
)
NESTED = tuple("(" * n + inner + ")" * n for n in range(4) for inner in ("a", "ab", "1ö"))
VALUES = (1, 12, 120, True, None, "ab", 'a"', {"ab": 12}, [], ["a", "b"])
JSON = tuple(json.dumps(v, separators=(",", ":")) for v in VALUES)
LARK = 'start: x | "(" (x | "(" (x | "(" x ")") ")") ")"\nx: "a" | "ab" | B\nB: /1ö/'
GBNF = 'root ::= x | "(" y ")"\ny ::= x | "(" z ")"\nz ::= x | "(" x ")"\nx ::= "a" "b"? | "1ö"'
LANGUAGES: dict[str, tuple[StructuredOutputs, tuple[str, ...]]] = {
    "choice": (StructuredOutputs(choice=WORDS), WORDS),
    "regex": (StructuredOutputs(regex=r"(ab|12){1,3}( tr(ue|ust))?|[xö]?"), (*PAIRS, "", "x", "ö")),
    "lark": (StructuredOutputs(grammar=LARK), NESTED),
    "gbnf": (StructuredOutputs(grammar=GBNF), NESTED),
    "json": (StructuredOutputs(json=json.dumps({"enum": VALUES}), disable_any_whitespace=True), JSON),
}
"""Descriptions -> every text that fits."""


def walk(grammars: Grammars, tokens: list[bytes], wanted: StructuredOutputs, seed: int, most: int) -> bytes:
    """Write a text of tokens drawn from the masks, to its end."""
    output, written, draws = grammars.begin(wanted), b"", random.Random(seed)
    for _ in range(most):
        token = draws.choice(allowed(output))
        is_complete = output.feed(token)
        assert output.error is None
        written += tokens[token]
        if is_complete:
            return written
    raise AssertionError(f"no end after {most} tokens: {written!r}")


@pytest.mark.parametrize(
    ("kind", "language"),
    [
        pytest.param(*case, marks=() if case == ("bpe", "gbnf") else thorough)
        for case in product(VOCABULARIES, LANGUAGES)
    ],
)
def test_masks_are_what_begins_some_text_of_the_language(kind: str, language: str) -> None:
    """In every state on the way to every text. Where one text alone can follow, and the output is not over,
    the library keeps to some of the tokens that fit."""
    (grammars, tokens), (wanted, texts) = vocabulary(kind), LANGUAGES[language]
    spelled = [t.encode() for t in texts]
    for seed in range(len(spelled)):
        output, written, draws = grammars.begin(wanted), b"", random.Random(seed)
        while True:
            left = [t.removeprefix(written) for t in spelled if t.startswith(written)]
            fitting = {i for i, t in enumerate(tokens) if t and any(rest.startswith(t) for rest in left)}
            fitting |= {EOS} if b"" in left else set()
            found = set(allowed(output))
            is_forced = len({rest[:1] for rest in left}) == 1
            assert found
            assert found <= fitting if is_forced else found == fitting, (written, found ^ fitting)
            token = draws.choice(sorted(found))
            written += tokens[token]
            is_over = token == EOS or {t for t in spelled if t.startswith(written)} == {written}
            assert output.feed(token) == is_over
            if is_over:
                assert written in spelled
                break


def test_where_an_output_stands_depends_on_its_tokens_alone() -> None:
    """An engine that takes it over feeds them to a grammar compiled anew."""
    grammars, tokens = vocabulary("bpe")
    text, _ = VOCABULARIES["bpe"]()
    other = Grammars(lambda: text, len(tokens) + MORE_LOGITS, {EOS})
    wanted = StructuredOutputs(json=json.dumps(PERSON))
    output, draws, fed = grammars.begin(wanted), random.Random(3), []
    for _ in range(40):
        assert allowed(other.begin(wanted, fed)) == allowed(output)
        fed.append(draws.choice(allowed(output)))
        if output.feed(fed[-1]):
            break
    assert len(fed) > 10


def test_descriptions_that_differ_in_anything_are_compiled_apart() -> None:
    grammars, _ = vocabulary("bpe")
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}})
    spaced, tight = (StructuredOutputs(json=schema, disable_any_whitespace=tight) for tight in (False, True))
    (bracket,) = allowed(grammars.begin(spaced))
    masks = [allowed(grammars.begin(wanted, [bracket])) for wanted in (spaced, tight, spaced)]
    assert masks[0] == masks[2] != masks[1]


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "kind", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -1, "exclusiveMaximum": 1}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@thorough
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_texts_of_drawn_tokens_fit_in_the_eyes_of_others(kind: str) -> None:
    grammars, tokens = vocabulary(kind)
    expression = r"[a-f]{2,4}(-[0-9]{1,2}){2}|x+y?"
    for seed in range(20):
        schema = StructuredOutputs(json=json.dumps(PERSON), disable_any_whitespace=True)
        found = walk(grammars, tokens, schema, seed, 2000).decode()
        jsonschema.validate(json.loads(found), PERSON)
        assert json.dumps(json.loads(found), separators=(",", ":"), ensure_ascii=False).count(
            " "
        ) == found.count(" ")
        assert re.fullmatch(
            expression, walk(grammars, tokens, StructuredOutputs(regex=expression), seed, 2000).decode()
        )


BAD: list[tuple[StructuredOutputs, str]] = [
    (StructuredOutputs(), "asks for nothing"),
    (StructuredOutputs(regex="a", json_object=True), "json_object and regex"),
    (StructuredOutputs(json="{"), "structured_outputs.json: no JSON"),
    (StructuredOutputs(json="[1]"), "object, or true"),
    (StructuredOutputs(json="false"), "object, or true"),
    (StructuredOutputs(json='{"type": "objekt"}'), "objekt"),
    (StructuredOutputs(json='{"uniqueItems": true, "type": "array"}'), "uniqueItems"),
    (StructuredOutputs(json='{"x-guidance": {"lenient": true}, "not": {}}'), '"not"'),
    (StructuredOutputs(json='{"$ref": "#"}'), "no text fits it"),
    (StructuredOutputs(json='{"$ref": "https://example.com/s"}'), "does not fetch|not present"),
    (StructuredOutputs(json='{"type": "array", "items": ' * 900 + "{}" + "}" * 900), "recursion"),
    (StructuredOutputs(json="[" * 100_000), "no JSON"),
    (StructuredOutputs(json=json.dumps({"enum": [f"x{i}" for i in range(20_000)]})), "characters are more"),
    (StructuredOutputs(regex="(a"), "unclosed group"),
    (StructuredOutputs(regex="(?=a)b"), "look-around"),
    (StructuredOutputs(regex=r"a[^\s\S]"), "no text fits it"),
    (StructuredOutputs(regex="a" * (MAX_STRUCTURE_CHARACTERS + 1)), "characters are more"),
    (StructuredOutputs(regex="\ud800"), "surrogates"),
    (StructuredOutputs(choice=("a", "")), "choice"),
    (StructuredOutputs(choice=("a",) * 1001), "choice"),
    (StructuredOutputs(grammar="start: foo"), "unknown name"),
    (StructuredOutputs(grammar="nonsense"), "grammar"),
]


@pytest.mark.parametrize(("wanted", "problem"), BAD, ids=[problem[:24] for _, problem in BAD])
def test_what_cannot_be_kept_to_is_refused_with_a_mend(wanted: StructuredOutputs, problem: str) -> None:
    grammars, _ = vocabulary("bytes")
    for refuse in (check, grammars.compile):
        with pytest.raises(UserError, match=problem) as caught:
            refuse(wanted)
        assert str(caught.value.where).startswith("structured_outputs")
        assert caught.value.mend
        assert len(str(caught.value)) < 1000


def test_clients_name_no_special_tokens() -> None:
    with pytest.raises(UserError, match="unknown special token"):
        check(StructuredOutputs(grammar='start: <|eos|> "a"'))


HOSTILE = {
    "repetitions": StructuredOutputs(regex="((((a{1,1000}){1,1000}){1,1000}){1,1000})"),
    "powers": StructuredOutputs(regex="(((a{100}){100}){100}){100}"),
    "ambiguity": StructuredOutputs(regex="(a+)+(a+)+(b|a)*c"),
    "states": StructuredOutputs(regex="(a|b)*a(a|b){200}c"),
    "items": StructuredOutputs(json='{"type": "array", "items": {"type": "integer"}, "minItems": 1000000}'),
    "length": StructuredOutputs(json='{"type": "string", "minLength": 100000000}'),
    "definitions": StructuredOutputs(
        json=json.dumps(
            {
                "$defs": {
                    **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)},
                    "d25": {"type": "string"},
                },
                "$ref": "#/$defs/d0",
            }
        )
    ),
    "products": StructuredOutputs(
        json=json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        )
    ),
    "rules": StructuredOutputs(grammar='start: s\ns: s s s | "a" | "aa" | '),
}

BOUNDED = """
import pickle, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from rayk.grammars import Grammars, check
from rayk.types.errors import UserError
name, wanted, text = pickle.loads(sys.stdin.buffer.read())
try:
    check(wanted)
    output = Grammars(lambda: text, 1024, {1}).begin(wanted)
except UserError as error:
    sys.exit(print("refused", error))
for _ in range(100):
    words = output.mask()
    tokens = [t for t in range(1024) if words[t // 32] >> (t % 32) & 1]
    if output.error or output.feed(tokens[-1]):
        break
print("taken")
"""


@thorough
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_descriptions_take_bounded_time_and_memory(name: str) -> None:
    """The kernel would end a process that takes more."""
    question = pickle.dumps((name, HOSTILE[name], VOCABULARIES["bpe"]()[0]))
    done = subprocess.run([sys.executable, "-c", BOUNDED], input=question, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.decode().split()[0] in ("taken", "refused")


def test_tokens_are_taken_up_to_one_that_the_output_fails_at() -> None:
    """Of byte tokens, each of which is looked for as if it were sampled by itself; the output stays where it
    was. What comes after its end is for others to cut."""
    grammars, tokens = vocabulary("bytes")
    a, b, x = (tokens.index(text) for text in (b"a", b"b", b"x"))
    output = grammars.begin(StructuredOutputs(regex="ab{2}"))
    for token_ids, num_taken in (
        ([a, b, b], 3),
        ([a, b, x], 2),
        ([a, x, b], 1),
        ([x, a], 1),
        ([a, b, b, x, x], 5),
        ([a], 1),
    ):
        assert output.num_taken(token_ids) == num_taken
        assert output.error is None
        assert allowed(output) == [a]


def test_a_machine_without_the_library_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from rayk.grammars import check\n"
        "from rayk.types.structured import StructuredOutputs\n"
        "check(StructuredOutputs(regex='a'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install llguidance" in done.stderr


def test_a_tokenizer_that_the_library_cannot_read_is_an_error_of_the_request() -> None:
    for load in (None, lambda: "{}", lambda: "no tokenizer"):
        with pytest.raises(UserError, match="tokenizer"):
            Grammars(load, 100).begin(StructuredOutputs(regex="a"))
