"""`python -m rayk.vllm.driver` runs one vLLM engine, in vLLM's environment, behind frames of `messages`.

Standard input brings {"op", "id", ...}; standard output answers {"id", ...}, each as soon as it can. Whatever
prints, prints to standard error. When the input ends, the process ends at once, and `keeper` ends its
children.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from rayk.vllm.messages import Frame, read_frame

WATCH_S = 0.5
DIED = 70
"""The exit status where vLLM's engine died behind its front."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


class Driver:
    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._engine: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        """Begin what a frame asks for."""
        task = asyncio.create_task(self._answer(frame.header))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: dict[str, Any]) -> None:
        number = asked.pop("id")
        try:
            operation = getattr(self, f"do_{asked.pop('op')}")
            found, body = await operation(**asked)
            frame = Frame({"id": number, **found}, body)
        except Exception as error:  # noqa: BLE001 - told to who asked
            traceback.print_exc()
            version = getattr(sys.modules.get("vllm"), "__version__", "")
            frame = Frame({"id": number, "error": _words(error), "version": version})
        self._answers.write(frame.encode())
        self._answers.flush()

    async def do_start(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        model = Path(arguments["model"])
        if model.is_dir() and not any((model / name).exists() for name in TOKENIZER_FILES):
            arguments.setdefault("skip_tokenizer_init", True)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        facts = (await self._engine.collective_rpc("rayk_facts"))[0]
        await self._engine.collective_rpc("rayk_unpin")
        self._tasks.add(asyncio.create_task(self._end_with_engine()))
        return {"facts": facts | {"version": vllm.__version__}}, b""

    async def _end_with_engine(self) -> None:
        """Requests are told of its death first."""
        while not self._engine.errored:
            await asyncio.sleep(WATCH_S)
        await asyncio.sleep(WATCH_S)
        os._exit(DIED)

    async def do_ping(self) -> tuple[dict[str, Any], bytes]:
        """Answered once every worker has."""
        await self._engine.collective_rpc("rayk_facts")
        return {}, b""

    async def do_generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: dict[str, Any],
        kv_transfer_params: dict[str, Any] | None,
    ) -> tuple[dict[str, Any], bytes]:
        """Generate all of a request's output, and when each token was there on this host's monotonic
        clock."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        params = SamplingParams(
            **sampling,
            detokenize=bool(sampling.get("stop")),
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
        tokens: list[int] = []
        times: list[int] = []
        logprobs: list[list[tuple[int, float]]] = []
        of_prompt: list[Any] = []
        found: dict[str, Any] = {}
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, request_id):
            (completion,) = output.outputs
            now_ns = time.monotonic_ns()
            tokens += completion.token_ids
            times += [now_ns] * len(completion.token_ids)
            told = zip(completion.token_ids, completion.logprobs or (), strict=False)
            logprobs += [_pairs(token, of, params.logprobs) for token, of in told]
            of_prompt += output.prompt_logprobs or ()
            if output.finished:
                found |= {
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "num_cached_tokens": output.num_cached_tokens or 0,
                    "kv_transfer_params": output.kv_transfer_params,
                }
        found |= {
            "token_ids": tokens,
            "times_ns": times,
            "logprobs": logprobs or None,
            "prompt_logprobs": None,
        }
        if of_prompt:
            both = zip(prompt, of_prompt, strict=True)
            found["prompt_logprobs"] = [p and _pairs(t, p, params.prompt_logprobs) for t, p in both]
        return found, b""

    async def do_abort(self, request_id: str) -> tuple[dict[str, Any], bytes]:
        await self._engine.abort(request_id)
        return {}, b""

    async def do_proof(self, request_id: str) -> tuple[dict[str, Any], bytes]:
        """Ask what each worker's connector found of a request."""
        return {"workers": await self._engine.collective_rpc("rayk_proof", args=(request_id,))}, b""

    async def do_rows(self, request_id: str) -> tuple[dict[str, Any], bytes]:
        """Copy the rows that each worker's connector kept, one worker after the other."""
        workers = await self._engine.collective_rpc("rayk_rows", args=(request_id,))
        return {"workers": [shapes for shapes, _ in workers]}, b"".join(rows for _, rows in workers)

    async def do_forget(self, proofs: bool) -> tuple[dict[str, Any], bytes]:
        """Empty the prefix cache and, with `proofs`, the proving connectors. The answer's `is_empty` is false
        while any block is in use: vLLM keeps the cache then."""
        if proofs:
            await self._engine.collective_rpc("rayk_forget")
        return {"is_empty": bool(await self._engine.reset_prefix_cache())}, b""


def _pairs(token: int, found: Any, num_best: int) -> list[tuple[int, float]]:
    """List (token id, log probability) of the token itself, then of the best ones, best first."""
    best = sorted(found.items(), key=lambda item: item[1].rank)[:num_best]
    return [(token, found[token].logprob), *((other, logprob.logprob) for other, logprob in best)]


def _words(error: BaseException) -> str:
    """Return an error and what it was raised of: vLLM wraps what a request or an engine failed of."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}" if str(seen) else type(seen).__name__)
        seen = seen.__cause__
    return "; ".join(dict.fromkeys(texts))


def _read(frames: BinaryIO, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
    try:
        while (frame := read_frame(frames)) is not None:
            loop.call_soon_threadsafe(driver.take, frame)
    finally:
        os._exit(0)


async def _serve(frames: BinaryIO, answers: BinaryIO) -> None:
    driver, loop = Driver(answers), asyncio.get_running_loop()
    threading.Thread(target=_read, args=(frames, driver, loop), daemon=True).start()
    await asyncio.Event().wait()


def main() -> None:
    frames, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    asyncio.run(_serve(frames, answers))


if __name__ == "__main__":
    main()
