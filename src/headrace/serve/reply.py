"""Answers in the forms that clients read: whole, or as a stream of events."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from headrace.serve.ask import Ask
from headrace.serve.conversation import Answered
from headrace.types import FinishReason

Json = dict[str, Any]


def event(data: Json | str, name: str = "") -> str:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def finish_reason(answered: Answered) -> str:
    if answered.answer.tool_calls:
        return "tool_calls"
    return "length" if answered.finish.cut or answered.finish is FinishReason.ABORT else "stop"


def _usage(answers: Sequence[Answered], names: tuple[str, str] = ("prompt_tokens", "completion_tokens")) -> Json:
    counts = len(answers[0].prompt_ids), sum(len(answered.token_ids) for answered in answers)
    return {**dict(zip(names, counts, strict=True)), "total_tokens": sum(counts)}


def _whole(ask: Ask, answers: Sequence[Answered], known: Json, said: Callable[[Answered], Json]) -> Json:
    choices = [
        {"index": i, **said(answered), "finish_reason": finish_reason(answered), **_extras(ask, answered)}
        for i, answered in enumerate(answers)
    ]
    return known | {"choices": choices, "usage": _usage(answers)} | _prompt_ids(ask, answers)


def _known(prefix: str, answers: Sequence[Answered], model: str, kind: str) -> Json:
    return {"id": prefix + answers[0].id, "object": kind, "created": int(time.time()), "model": model}


def _extras(ask: Ask, answered: Answered) -> Json:
    extras: Json = {"logprobs": None}
    if ask.with_logprobs:
        rest: Json = {"bytes": None, "top_logprobs": []}
        pairs = zip(answered.token_ids, answered.logprobs, strict=True)
        extras["logprobs"] = {"content": [{"token": f"token_id:{id}", "logprob": x, **rest} for id, x in pairs]}
    return extras | ({"token_ids": answered.token_ids} if ask.with_token_ids else {})


def _prompt_ids(ask: Ask, answers: Sequence[Answered]) -> Json:
    return {"prompt_token_ids": answers[0].prompt_ids.tolist()} if ask.with_token_ids else {}


def chat(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    def said(answered: Answered) -> Json:
        content = answered.answer.content or (None if answered.answer.tool_calls else "")
        return {"message": answered.answer.message() | {"content": content, "refusal": None}}

    return _whole(ask, answers, _known("chatcmpl-", answers, model, "chat.completion"), said)


def chat_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    known = _known("chatcmpl-", answers, model, "chat.completion.chunk")

    def chunk(i: int, delta: Json, reason: str | None = None, **more: Any) -> str:
        choice = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": None}
        return event(known | {"choices": [choice | more]})

    for i, answered in enumerate(answers):
        message = answered.answer.message()
        yield chunk(i, {"role": "assistant", "content": ""})
        for part in ("reasoning_content", "content"):
            if message.get(part):
                yield chunk(i, {part: message[part]})
        for k, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(i, {"tool_calls": [{"index": k, **call}]})
        yield chunk(i, {}, finish_reason(answered), **_extras(ask, answered), **_prompt_ids(ask, [answered]))
    yield from _end(ask, answers, known)


def _end(ask: Ask, answers: Sequence[Answered], known: Json) -> Iterator[str]:
    if ask.with_usage:
        yield event(known | {"choices": [], "usage": _usage(answers)})
    yield event("[DONE]")


def response(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    (answered,) = answers
    cut = finish_reason(answered) == "length"
    schema = {"type": "json_schema", "name": "answer", "schema": ask.json_schema}
    usage = _usage(answers, ("input_tokens", "output_tokens"))
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    return _known("resp_", answers, model, "response") | {
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": ask.instructions or None,
        "metadata": {},
        "output": list(_items(answered)),
        "parallel_tool_calls": True,
        "previous_response_id": ask.previous or None,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "text": {"format": schema if ask.json_schema else {"type": "text"}},
        "tool_choice": "auto" if ask.may_call else "none",
        "tools": [{"type": "function", **tool["function"]} for tool in ask.tools],
        "usage": usage,
    }


def _items(answered: Answered) -> Iterator[Json]:
    answer = answered.answer
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{answered.id}", "summary": [], "content": thought}
    if answer.content or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.content, "annotations": []}
        known = {"type": "message", "id": f"msg_{answered.id}", "role": "assistant", "status": "completed"}
        yield known | {"content": [part]}
    for call in answer.tool_calls:
        known = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        yield known | {"name": call.name, "arguments": call.arguments}


def response_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    whole, numbers = response(ask, answers, model), count()

    def say(kind: str, **data: Any) -> str:
        return event({"type": f"response.{kind}", "sequence_number": next(numbers), **data}, f"response.{kind}")

    begun: Json = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield say("created", response=whole | begun)
    for i, item in enumerate(whole["output"]):
        at: Json = {"item_id": item["id"], "output_index": i}
        hollow: Json = {"content": []} if "content" in item else {"arguments": ""}
        yield say("output_item.added", output_index=i, item=item | hollow)
        if item["type"] == "message":
            (part,) = item["content"]
            at["content_index"] = 0
            yield say("content_part.added", **at, part=part | {"text": ""})
            yield say("output_text.delta", **at, delta=part["text"], logprobs=[])
            yield say("output_text.done", **at, text=part["text"], logprobs=[])
            yield say("content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield say("function_call_arguments.delta", **at, delta=item["arguments"])
            yield say("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        yield say("output_item.done", output_index=i, item=item)
    yield say(whole["status"], response=whole)


def completion(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    known = _known("cmpl-", answers, model, "text_completion")
    return _whole(ask, answers, known, lambda answered: {"text": answered.text})


def completion_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    whole = completion(ask, answers, model)
    del whole["usage"]
    yield event(whole)
    yield from _end(ask, answers, whole)


def generation(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    return _whole(ask, answers, {"request_id": f"gen-{answers[0].id}"}, lambda answered: {})
