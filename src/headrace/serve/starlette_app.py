"""The endpoint's routes: who asks, what is refused, and how answers travel."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.episode.session import AbortedError
from headrace.serve import reply
from headrace.serve.ask import Ask, ChatAsk, CompletionsAsk, GenerateAsk, RefusedError, ResponsesAsk
from headrace.serve.conversation import Answered, Answering
from headrace.serve.front_desk import FrontDesk

MAX_BODY_BYTES = 16 << 20
BODY_S = 30.0  # in which a body must have come
KEEP_ALIVE_S = 10.0  # after which a stream says that it is still there
KEEP_ALIVE = ": keepalive\n"  # no event of its own: some clients would read an empty one

Whole = Callable[[Ask, list[Answered], str], dict[str, Any]]
Events = Callable[[Ask, list[Answered], str], Iterator[str]]
Handler = Callable[[FrontDesk, Request], Awaitable[Response]]

# of each route: what its requests are, and how answers are written, whole or in a stream
FORMS: dict[str, tuple[type[Ask], Whole, Events | None]] = {
    "/v1/chat/completions": (ChatAsk, reply.chat, reply.chat_events),
    "/v1/responses": (ResponsesAsk, reply.response, reply.response_events),
    "/v1/completions": (CompletionsAsk, reply.completion, reply.completion_events),
    "/inference/v1/generate": (GenerateAsk, reply.generation, None),
}
REWARD = "/episodes/{id}/reward"
PATH = re.compile(r"(?:/sessions/(?P<key>[^/]+))?(?P<rest>/episodes/(?P<id>[^/]+)/reward|/.*)")
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def application(desk: FrontDesk) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """The endpoint over what `desk` has open. Each route can also stand behind /sessions/KEY."""
    routes: dict[tuple[str, str], Handler] = {("POST", path): partial(_answer, *form) for path, form in FORMS.items()}
    routes |= {("GET", "/v1/models"): _models, ("POST", "/episodes"): _pull, ("POST", REWARD): _reward}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        request, found = Request(scope, receive), PATH.fullmatch(scope["path"])
        scope["path_params"] = found.groupdict() if found else {}
        path = REWARD if found and found["id"] else found["rest"] if found else ""
        try:
            if (request.method, path) not in routes:
                known = any(path == other for _, other in routes)
                text = f"there is no {request.method} {scope['path'][:80]} here"
                raise RefusedError(text, status=405 if known else 404, code="unknown_url")
            response = await routes[request.method, path](desk, request)
        except Exception as error:
            refused = _as_refused(error)
            headers = {"x-should-retry": "true", "Retry-After": str(refused.after_s)}
            headers = headers if refused.after_s else {"x-should-retry": "false"}
            response = JSONResponse({"error": _explained(refused)}, refused.status, headers)
        with suppress(ClientDisconnect):
            await response(scope, receive, send)

    return answer


def _as_refused(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, AbortedError):
        return RefusedError("the episode is over", status=410, code="episode_over")
    if isinstance(error, ClientDisconnect | RecursionError | UnicodeError):
        return RefusedError("the request is nested too deeply, is not valid Unicode, or was broken off")
    return RefusedError(f"{type(error).__name__}: {error}"[:400], status=500)


def _explained(refused: RefusedError) -> dict[str, Any]:
    kind = KINDS.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}


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
        body = from_json(bytes(data))
    except ValueError as error:
        raise RefusedError(f"the body is not valid JSON: {str(error)[:80]}") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    return body


async def _answer(kind: type[Ask], whole: Whole, events: Events | None, desk: FrontDesk, request: Request) -> Response:
    desk.check(_key(request))  # before anything is read
    ask = kind.read(await _body(request))
    is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    conversation = desk.conversation(_key(request), ask, is_retry=is_retry)
    task = await conversation.take(ask, is_retry=is_retry, is_gone=request.is_disconnected)
    if ask.stream and events is not None:
        written = _stream(task, lambda answers: events(ask, answers, desk.model))
        return StreamingResponse(written, media_type="text/event-stream")
    answers = await asyncio.shield(task)  # the turn is complete even if the client is gone
    return Response(to_json(whole(ask, answers, desk.model)), media_type="application/json")


async def _stream(answers: Answering, events: Callable[[list[Answered]], Iterator[str]]) -> AsyncIterator[str]:
    while not (await asyncio.wait([answers], timeout=KEEP_ALIVE_S))[0]:
        yield KEEP_ALIVE
    try:
        for text in events(answers.result()):
            yield text
    except Exception as error:  # the status is sent already
        yield reply.event({"error": _explained(_as_refused(error))}, "error")


async def _models(desk: FrontDesk, request: Request) -> Response:
    desk.check(_key(request))
    model = {"id": desk.model, "object": "model", "created": 0, "owned_by": "headrace"}
    return JSONResponse({"object": "list", "data": [model | {"max_model_len": desk.max_context}]})


async def _pull(desk: FrontDesk, request: Request) -> Response:
    return JSONResponse(await desk.pull(_key(request), request.is_disconnected))


async def _reward(desk: FrontDesk, request: Request) -> Response:
    desk.check(_key(request))
    desk.reward(_key(request), request.path_params["id"], await _body(request))
    return JSONResponse({"ok": True})
