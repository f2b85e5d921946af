"""The endpoint's routes: who asks, what is refused, and how answers travel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.episode.session import AbortedError
from headrace.serve import reply
from headrace.serve.ask import Ask, RefusedError, read_chat, read_completions, read_generate, read_responses
from headrace.serve.conversation import Answered
from headrace.serve.front_desk import FrontDesk

MAX_BODY_BYTES = 16 << 20
BODY_S = 30.0  # in which a body must have come
KEEP_ALIVE_S = 10.0  # after which a stream says that it is still there
KEEP_ALIVE = ": keepalive\n"  # no event of its own: some clients would read an empty one

Whole = Callable[[Ask, list[Answered], str], dict[str, Any]]
Events = Callable[..., Iterator[str]]


@dataclass(frozen=True, slots=True)
class Form:
    """How a route's requests are read, and its answers written."""

    path: str
    read: Callable[[Mapping[str, Any]], Ask]
    whole: Whole
    events: Events | None = None


FORMS = (
    Form("/v1/chat/completions", read_chat, reply.chat, reply.chat_events),
    Form("/v1/responses", read_responses, reply.response, reply.response_events),
    Form("/v1/completions", read_completions, reply.completion, reply.completion_events),
    Form("/inference/v1/generate", read_generate, reply.generation),
)


def application(desk: FrontDesk) -> Starlette:
    """The endpoint over what `desk` has open. Each route can also stand behind /sessions/KEY."""
    routes = [(form.path, "POST", partial(_answer, desk, form)) for form in FORMS]
    routes += [("/v1/models", "GET", partial(_models, desk)), ("/episodes", "POST", partial(_pull, desk))]
    routes += [("/episodes/{id}/reward", "POST", partial(_reward, desk))]
    return Starlette(
        routes=[
            Route(prefix + path, _guarded(handler), methods=[method])
            for path, method, handler in routes
            for prefix in ("", "/sessions/{key}")
        ],
        exception_handlers={404: _unknown, 405: _unknown},
    )


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedError as refused:
            return _refusal(refused)
        except AbortedError:
            return _refusal(RefusedError("the episode is over", status=410, code="episode_over"))
        except ClientDisconnect:
            return Response(status_code=400)
        except (RecursionError, UnicodeError):
            return _refusal(RefusedError("the request is nested too deeply, or not valid Unicode"))

    return handle


def _refusal(refused: RefusedError) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    error = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    headers = {"x-should-retry": "true" if refused.after_s else "false"}
    if refused.after_s:
        headers["Retry-After"] = str(refused.after_s)
    return JSONResponse({"error": error}, status_code=refused.status, headers=headers)


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = f"there is no {request.method} {request.url.path[:80]} here"
    return _refusal(RefusedError(text, status=status, code="unknown_url"))


def _key(request: Request) -> str:
    """Of the session: in the path, or the bearer's."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return str(request.path_params.get("key") or (bearer.strip() if scheme.lower() == "bearer" else ""))


async def _body(request: Request) -> dict[str, Any]:
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise RefusedError(f"the body is larger than {MAX_BODY_BYTES:,} bytes", status=413)
    except TimeoutError as error:
        raise RefusedError(f"the body did not come in {BODY_S:g} s", status=408) from error
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not valid JSON: {str(error)[:80]}") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    return body


async def _answer(desk: FrontDesk, form: Form, request: Request) -> Response:
    desk.check(_key(request))  # before anything is read
    ask = desk.prepared(form.read(await _body(request)))
    if (ask.stream and form.events is None) or (ask.n > 1 and form.whole is reply.response):
        raise RefusedError("this route gives one answer, whole", param="stream" if ask.stream else "n")
    is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    conversation = desk.conversation(_key(request), ask)
    task = await conversation.take(ask, is_retry=is_retry, is_gone=request.is_disconnected)

    async def answers() -> list[Answered]:
        found = await asyncio.shield(task)  # the turn is complete even if the client is gone
        if form.whole is reply.response:
            conversation.remember(f"resp_{found[0].id}", ask, found[0])
        return found

    if not ask.stream or form.events is None:
        return JSONResponse(form.whole(ask, await answers(), desk.model))
    events = partial(form.events, ask, model=desk.model)
    return StreamingResponse(_stream(answers(), events), media_type="text/event-stream")


async def _stream(
    answers: Awaitable[list[Answered]], events: Callable[[list[Answered]], Iterator[str]]
) -> AsyncIterator[str]:
    waiting = asyncio.ensure_future(answers)
    while not (await asyncio.wait([waiting], timeout=KEEP_ALIVE_S))[0]:
        yield KEEP_ALIVE
    try:
        for text in events(waiting.result()):
            yield text
    except AbortedError:
        yield reply.event({"error": {"message": "the episode is over", "code": "episode_over"}}, "error")


async def _models(desk: FrontDesk, request: Request) -> Response:
    desk.check(_key(request))
    model = {"id": desk.model, "object": "model", "created": 0, "owned_by": "headrace"}
    return JSONResponse({"object": "list", "data": [model | {"max_model_len": desk.max_context}]})


async def _pull(desk: FrontDesk, request: Request) -> Response:
    return JSONResponse(await desk.pull(_key(request)))


async def _reward(desk: FrontDesk, request: Request) -> Response:
    desk.check(_key(request))
    body = await _body(request)
    desk.reward(_key(request), request.path_params["id"], body)
    return JSONResponse({"ok": True})
