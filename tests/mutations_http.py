"""Bugs to plant between clients and engines; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

TEXT = "tests/serve/test_text.py"
GUARD = "tests/serve/test_guard.py"
GONE = "tests/serve/test_disconnect.py::test_every_choice_is_aborted_and_has_the_time_to_clean_up"
COMPLETIONS = "tests/serve/test_completions.py"
LOGPROBS = "tests/serve/test_logprobs.py"
CHAT = "tests/serve/test_chat.py"
CALLS = "tests/serve/test_generator_calls.py"
JOINED = f"{TEXT}::test_deltas_join_to_the_tokenizers_own_text"
NAMED = f"{GUARD}::test_what_is_wrong_is_named"

HTTP = (
    Mutation(
        "a role that cannot be is bad input",
        "rayk/serve/errors.py",
        'return ApiError(409, str(error), param="role", code="role_conflict")',
        "return ApiError(400, str(error))",
        "tests/serve/test_engines.py::test_what_cannot_be_is_refused_and_changes_nothing",
    ),
    Mutation(
        "half a character is told",
        "rayk/serve/text.py",
        "if new and not new.endswith(REPLACEMENT):\n            return self._tell(len(self._waiting), new)",
        "if new:\n            return self._tell(len(self._waiting), new)",
        JOINED,
    ),
    Mutation(
        "a run of bytes is told byte by byte",
        "rayk/serve/text.py",
        "self._in_run = token_id in self._text.byte_ids",
        "self._in_run = False",
        JOINED,
    ),
    Mutation(
        "every token is decoded as if it began the text",
        "rayk/serve/text.py",
        "self._context, self._waiting = self._waiting[:num_tokens], self._waiting[num_tokens:]",
        "self._context, self._waiting = [], self._waiting[num_tokens:]",
        JOINED,
    ),
    Mutation(
        "text is given up in the middle of a character",
        "rayk/serve/text.py",
        "if new == first + self._decode(self._waiting[-keep:]):",
        "if new:",
        f"{TEXT}::test_what_is_given_up_ends_before_a_character_that_still_comes",
    ),
    Mutation(
        "what waits at the end is lost",
        "rayk/serve/answers.py",
        "self._grow(self._detokenizer.end())",
        "pass",
        f"{GUARD}::test_half_a_character_at_the_end_is_told",
    ),
    Mutation(
        "the stop string is told",
        "rayk/serve/answers.py",
        "return held if at < 0 else held[:at]",
        "return held",
        f"{COMPLETIONS}::test_a_stop_string_ends_the_text_before_it",
        needs_fixtures=True,
    ),
    Mutation(
        "the beginning of a stop string is told",
        "rayk/serve/answers.py",
        "longest = min(len(text), len(stop) - 1)",
        "longest = min(len(text), len(stop) - 2)",
        f"{COMPLETIONS}::test_a_stop_string_ends_the_text_before_it",
        needs_fixtures=True,
    ),
    Mutation(
        "all choices draw with one seed",
        "rayk/serve/asks.py",
        "    if index == 0:\n        return seed",
        "    if True:\n        return seed",
        f"{COMPLETIONS}::test_choices_differ_and_come_again_with_the_seed",
        needs_fixtures=True,
    ),
    Mutation(
        "choices of a batch count by number first",
        "rayk/serve/asks.py",
        "self.answer.prompts[index // (self.body.n or 1)]",
        "self.answer.prompts[index % len(self.answer.prompts)]",
        f"{LOGPROBS}::test_scoring_a_prompt_generates_nothing",
        needs_fixtures=True,
    ),
    Mutation(
        "the prompt's tokens begin where the output's do",
        "rayk/serve/completions.py",
        "found.add(told.token_id, told, len(echoed) + start)",
        "found.add(told.token_id, told, start)",
        f"{LOGPROBS}::test_echo_tells_of_prompt_and_output",
        needs_fixtures=True,
    ),
    Mutation(
        "a key's beginning is enough",
        "rayk/serve/guard.py",
        "hmac.compare_digest(given.strip(), key.encode())",
        "hmac.compare_digest(given.strip()[: len(key)], key.encode())",
        f"{GUARD}::test_the_key_is_asked_for_everywhere_but_of_health",
    ),
    Mutation(
        "keys are compared letter by letter",
        "rayk/serve/guard.py",
        "hmac.compare_digest(given.strip(), key.encode())",
        "given.strip() == key.encode()",
        f"{GUARD}::test_keys_are_compared_in_constant_time",
    ),
    Mutation(
        "a body of untold length may be of any",
        "rayk/serve/guard.py",
        "            self._check_length(length)\n            if not message",
        "            if not message",
        f"{GUARD}::test_a_body_that_is_too_large_is_not_read",
    ),
    Mutation(
        "prompts may be as long as anybody likes",
        "rayk/serve/asks.py",
        "if limit is not None and num_tokens > limit:",
        "if limit is not None and num_tokens > limit + 1:",
        NAMED,
    ),
    Mutation(
        "one token too many fits the context",
        "rayk/serve/asks.py",
        "if asked > model.max_positions:",
        "if asked > model.max_positions + 1:",
        NAMED,
    ),
    Mutation(
        "a prompt is blamed for what its answer takes",
        "rayk/serve/asks.py",
        'param = "prompt" if num_tokens >= model.max_positions else asked_by',
        'param = "prompt"',
        NAMED,
    ),
    Mutation(
        "long texts are tokenised to be refused",
        "rayk/serve/asks.py",
        "if fewest >= max_positions:",
        "if fewest > 1 << 30:",
        f"{GUARD}::test_a_text_that_cannot_fit_is_not_tokenised",
    ),
    Mutation(
        "texts that fit are taken for too long",
        "rayk/serve/text.py",
        "max(_LEAST_LONGEST, *map(len, self._tokenizer.get_vocab()))",
        "4",
        f"{TEXT}::test_no_text_has_fewer_tokens_than_was_said",
    ),
    Mutation(
        "a stream that failed says that all was sent",
        "rayk/serve/replies.py",
        "await _send_part(send, event(told.body))",
        "await _send_part(send, event(told.body) + DONE)",
        f"{GUARD}::test_an_error_behind_the_first_token_is_an_event_and_no_done",
    ),
    Mutation(
        "a stream without an end is an answer",
        "rayk/serve/answers.py",
        'raise ApiError(503, "the request ended without its last token"',
        'ApiError(503, "the request ended without its last token"',
        f"{GUARD}::test_an_abort_or_a_stream_without_an_end_is_no_answer",
    ),
    Mutation(
        "who goes is not noticed",
        "rayk/serve/replies.py",
        "await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)",
        "await asyncio.wait({task})",
        GONE,
    ),
    Mutation(
        "the other choices go on",
        "rayk/serve/answers.py",
        "        for task in tasks:\n            task.cancel()\n        await asyncio.wait(tasks)",
        "        pass",
        GONE,
    ),
    Mutation(
        "streams are told to try again never",
        "rayk/serve/errors.py",
        "max(1, math.ceil(self.retry_after_s))",
        "int(self.retry_after_s)",
        f"{GUARD}::test_errors_before_the_first_token_have_their_status",
    ),
    Mutation(
        "chats are tokenised as texts",
        "rayk/serve/chat.py",
        "return text.encode(told, add_special_tokens=False)",
        "return text.encode(told)",
        f"{CHAT}::test_special_tokens_are_the_templates_alone",
    ),
    Mutation(
        "every chunk names the role",
        "rayk/serve/chat.py",
        "if piece.is_first:",
        "if True:",
        f"{CHAT}::test_a_stream_names_the_role_once_and_says_the_same",
        needs_fixtures=True,
    ),
    Mutation(
        "HEAD is refused",
        "rayk/serve/replies.py",
        'await self._app({**scope, "method": "GET"}, receive, without_body)',
        "await self._app(scope, receive, without_body)",
        f"{CALLS}::test_head_is_answered_as_get_without_the_body",
        needs_fixtures=True,
    ),
)
