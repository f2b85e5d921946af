"""Answers in the forms that clients read: whole, or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.serve.ask import Ask
from headrace.serve.conversation import Answered
from headrace.types import FinishReason

Json = dict[str, Any]


def event(data: Json | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def finish_reason(answered: Answered) -> str:
    if answered.call_ids:
        return "tool_calls"
    return "length" if answered.finish.cut or answered.finish is FinishReason.ABORT else "stop"


def _usage(answers: Sequence[Answered], names: tuple[str, str] = ("prompt_tokens", "completion_tokens")) -> Json:
    counts = len(answers[0].prompt_ids), sum(len(answered.token_ids) for answered in answers)
    return {**dict(zip(names, counts, strict=True)), "total_tokens": sum(counts)}


def _logprobs(answered: Answered) -> Json:
    pairs = zip(answered.token_ids, answered.logprobs, strict=True)
    rest: Json = {"bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{id}", "logprob": number, **rest} for id, number in pairs]}


def _extras(ask: Ask, answered: Answered) -> Json:
    """What a choice holds if it was asked for."""
    extras: Json = {"logprobs": _logprobs(answered) if ask.with_logprobs else None}
    return extras | ({"token_ids": answered.token_ids} if ask.with_token_ids else {})


def _prompt_ids(ask: Ask, answers: Sequence[Answered]) -> Json:
    return {"prompt_token_ids": answers[0].prompt_ids} if ask.with_token_ids else {}


# ---- chat completions


def chat(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    choices = []
    for i, answered in enumerate(answers):
        message = answered.message | {"content": answered.answer.content or None, "refusal": None}
        message = message if message["content"] or answered.call_ids else message | {"content": ""}
        choice = {"index": i, "message": message, "finish_reason": finish_reason(answered)}
        choices.append(choice | _extras(ask, answered))
    known = _known("chatcmpl-", answers, model, "chat.completion")
    return known | {"choices": choices, "usage": _usage(answers)} | _prompt_ids(ask, answers)


def chat_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    known = _known("chatcmpl-", answers, model, "chat.completion.chunk")

    def chunk(i: int, delta: Json, reason: str | None = None, **more: Any) -> str:
        choice = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": None}
        return event(known | {"choices": [choice | more]})

    for i, answered in enumerate(answers):
        answer = answered.answer
        yield chunk(i, {"role": "assistant", "content": ""})
        if answer.reasoning:
            yield chunk(i, {"reasoning_content": answer.reasoning})
        if answer.content:
            yield chunk(i, {"content": answer.content})
        for k, call in enumerate(answered.message.get("tool_calls") or ()):
            yield chunk(i, {"tool_calls": [{"index": k, **call}]})
        extras = _extras(ask, answered) | _prompt_ids(ask, [answered])
        yield chunk(i, {}, finish_reason(answered), **extras)
    if ask.with_usage:
        yield event(known | {"choices": [], "usage": _usage(answers)})
    yield event("[DONE]")


# ---- responses


def response(ask: Ask, answers: Sequence[Answered], model: str, *, status: str = "completed") -> Json:
    (answered,) = answers
    cut = finish_reason(answered) == "length"
    text = {"type": "json_schema", "name": "answer", "schema": ask.schema} if ask.schema else {"type": "text"}
    usage = _usage(answers, ("input_tokens", "output_tokens"))
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    done = status == "completed"
    return _known("resp_", answers, model, "response") | {
        "created_at": int(time.time()),
        "status": "incomplete" if cut and done else status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut and done else None,
        "error": None,
        "instructions": ask.instructions or None,
        "metadata": {},
        "output": output_items(answered) if done else [],
        "parallel_tool_calls": True,
        "previous_response_id": ask.previous or None,
        "temperature": ask.sampling.get("temperature"),
        "top_p": ask.sampling.get("top_p"),
        "text": {"format": text},
        "tool_choice": "auto" if ask.may_call else "none",
        "tools": [{"type": "function", **tool["function"]} for tool in ask.tools or ()],
        "usage": usage if done else None,
    }


def output_items(answered: Answered) -> list[Json]:
    answer, items = answered.answer, list[Json]()
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answered.id}", "summary": [], "content": thought})
    if answer.content or not answered.call_ids:
        part = {"type": "output_text", "text": answer.content, "annotations": []}
        known = {"type": "message", "id": f"msg_{answered.id}", "role": "assistant", "status": "completed"}
        items.append(known | {"content": [part]})
    for call, id in zip(answer.tool_calls, answered.call_ids, strict=True):
        known = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "status": "completed"}
        items.append(known | {"name": call.name, "arguments": call.arguments})
    return items


def response_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    events: list[Json] = [{"type": "response.created", "response": response(ask, answers, model, status="in_progress")}]
    for i, item in enumerate(output_items(answers[0])):
        at, hollow = {"item_id": item["id"], "output_index": i}, dict(item)
        hollow["content" if "content" in item else "arguments"] = [] if "content" in item else ""
        events.append({"type": "response.output_item.added", "output_index": i, "item": hollow})
        if item["type"] == "message":
            part, at = item["content"][0], at | {"content_index": 0}
            text = part["text"]
            events.append({"type": "response.content_part.added", **at, "part": part | {"text": ""}})
            events.append({"type": "response.output_text.delta", **at, "delta": text, "logprobs": []})
            events.append({"type": "response.output_text.done", **at, "text": text, "logprobs": []})
            events.append({"type": "response.content_part.done", **at, "part": part})
        elif item["type"] == "function_call":
            text = item["arguments"]
            kind = "response.function_call_arguments"
            events.append({"type": f"{kind}.delta", **at, "delta": text})
            events.append({"type": f"{kind}.done", **at, "arguments": text, "name": item["name"]})
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    whole = response(ask, answers, model)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, data in enumerate(events):
        yield event(data | {"sequence_number": number}, data["type"])


# ---- texts and tokens


def completion(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    choices = [
        {"index": i, "text": answered.text, "finish_reason": finish_reason(answered)} | _extras(ask, answered)
        for i, answered in enumerate(answers)
    ]
    known = _known("cmpl-", answers, model, "text_completion")
    return known | {"choices": choices, "usage": _usage(answers)} | _prompt_ids(ask, answers)


def completion_events(ask: Ask, answers: Sequence[Answered], model: str) -> Iterator[str]:
    whole = completion(ask, answers, model)
    usage = whole.pop("usage")
    yield event(whole)
    if ask.with_usage:
        yield event(whole | {"choices": [], "usage": usage})
    yield event("[DONE]")


def generation(ask: Ask, answers: Sequence[Answered], model: str) -> Json:
    choices = [
        {"index": i, "finish_reason": finish_reason(answered)} | _extras(ask, answered)
        for i, answered in enumerate(answers)
    ]
    known = {"request_id": f"gen-{answers[0].id}", "choices": choices, "usage": _usage(answers)}
    return known | _prompt_ids(ask, answers)


def _known(prefix: str, answers: Sequence[Answered], model: str, kind: str) -> Json:
    return {"id": prefix + answers[0].id, "object": kind, "created": int(time.time()), "model": model}
