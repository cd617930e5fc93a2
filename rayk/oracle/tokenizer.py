"""A byte-level BPE tokenizer small enough to build in milliseconds, complete enough to serve text.

All 256 bytes are tokens, so any UTF-8 text round-trips; the merges come from the text below.
(AutoTokenizer forces its Qwen2Tokenizer on model_type qwen2, which normalises text to NFC first.)
"""

from __future__ import annotations

from typing import Any

from rayk.types.errors import UserError

# The last name is the one that Qwen2Tokenizer would add where it is missing.
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|endoftext|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
"""Their ids are 0, 1, 2."""

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "[{{ message['role'] }}]\n{{ message['content'] }}\n{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

_TEXT = """
A prefill engine reads the whole prompt at once and writes the keys and values of every token into
its cache; a decode engine then produces one token after another and reads all of them back. When
the two run on different machines, the cache has to move between them, and when they split the
model over a different number of devices, every head must find its way to the right place.
The quick brown fox jumps over the lazy dog, while seven wizards quietly mix boxes of jam and honey.
Once upon a time there was a small village by the river, where people baked bread in the morning,
worked in the fields during the day, and told each other stories in the evening. One of the stories
was about a traveller who wanted to count all the stars; he had counted for forty years, from 1 to
1,234,567,890, when someone asked him what he would do with the number. "I shall write it down,"
he said, "and then I shall begin again, because by then there may be others." It is not known
whether he ever finished. Questions that are easy to ask are often hard to answer: who, what, where,
when, why, how much, how many, and how long? There should be one obvious way to do it, although that
way may not be obvious at first. def main(argument): return [value for value in range(10) if value]
{"name": "value", "items": [1, 2, 3], "valid": true, "nothing": null} <html><body>text</body></html>
Grüße aus Köln, déjà vu, mañana, naïve façade. Привет, мир. 你好，世界。こんにちは。
"""


def build_tokenizer(vocab_size: int, *, adds_bos: bool) -> Any:
    """Build a PreTrainedTokenizerFast with exactly `vocab_size` tokens.

    Ids beyond what the built-in text yields are reserved tokens, as in released checkpoints. Raises UserError
    if the vocabulary cannot hold all bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size {vocab_size} cannot hold 256 bytes and {len(SPECIAL_TOKENS)} special tokens",
            mend=f"use {SMALLEST_VOCABULARY} or more",
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    spare = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(spare)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A {BOS}:1 $B:1",
            special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
