"""Access control for ``transformers serve``: untrusted clients may only query the one model, within its context.

That server trusts its clients: a request may load any model, bring its own chat template (a program) or generation
config, and be of any size.
"""

import functools
import hmac
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

from anybit.errors import CheckpointError, TextError, printable
from anybit.hf.template import render
from anybit.models.modules import check_tokens

ROUTES = {
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ("GET", "/health"),
}  # fmt: skip
BODY = 8 << 20
"""Most bytes of a request: about two million tokens."""
CONTEXT = 1 << 17
"""Most tokens of a prompt and its answer, if neither the model nor ``--max-length`` sets a limit."""
STOPS, STOP_LENGTH = 16, 256

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "seed"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty"), (int, float)),
    "messages": (list,),
    "prompt": (str,),
    "input": (str, list),
    "chat_template_kwargs": (dict,),
}
_BOUNDS = {"temperature": (1e-4, 100.0), "top_p": (0.0, 1.0), "frequency_penalty": (-0.99, 100.0)}
"""Beyond these, scores become inf or NaN; sampling from those makes the CUDA context unusable (device-side assert)."""
_NEEDED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("logprobs", "echo", "background"), (False,)),
    **dict.fromkeys(("top_logprobs", "presence_penalty"), (0,)),
    **dict.fromkeys(("audio", "functions", "function_call", "prediction", "previous_response_id"), ()),
    "web_search_options": (),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "truncation": ("disabled",),
}
"""Fields that transformers would ignore, and the values that mean the same as leaving them out."""
_TEXTS = ("text", "input_text", "output_text", "refusal")
_logger = logging.getLogger(__name__)


class _Refused(Exception):  # noqa: N818  an answer, not an error
    """A rejected request. status: HTTP status; reason: the message to the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Door:
    """ASGI middleware that rejects requests the app must not serve.

    key: API key for requests to /v1 (``Authorization: Bearer KEY``); None: no key.
    """

    def __init__(self, app: Any, key: str | None = None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_route(scope)
            body = await _body(scope, receive)
            body = checked(body, scope["path"]) if scope["method"] == "POST" else body
        except _Refused as refused:
            await _answer(send, refused)
            return
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Any:
            return rest.pop() if rest else await receive()

        try:
            await self._app(scope, replayed, send)
        except Exception as error:  # the client already got an answer; a traceback would only quote its input
            _logger.warning("a request failed: %s", printable(repr(error)[:300]))
            _logger.debug("the request that failed", exc_info=True)

    def _check_route(self, scope: Any) -> None:
        method, path = scope["method"], scope["path"]
        if (method, path) not in ROUTES:
            raise _Refused(404, "available: " + ", ".join(" ".join(route) for route in sorted(ROUTES)))
        if self._key is not None and path.startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
                raise _Refused(401, "this server needs an API key: Authorization: Bearer KEY")


async def _body(scope: Any, receive: Any) -> bytes:
    """A request's whole body. Raises _Refused if its content-length, or what has arrived so far, is too long."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    said = int(length[:20]) if length.isdigit() else 0
    size, parts, more = 0, list[bytes](), True
    while size <= BODY and said <= BODY:
        if not more:
            return b"".join(parts)
        message = await receive()
        more = message.get("more_body", False)  # also False after a disconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    raise _Refused(413, f"a request may have at most {BODY >> 20} MiB")


def told(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's format: from any other, its clients show only the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def tell_as_openai(app: Any) -> Any:
    """Make a FastAPI app return errors in OpenAI's format. Returns the app."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    async def refused(_: Any, error: Any) -> Any:
        return JSONResponse(told(error.status_code, str(error.detail)), error.status_code, headers=error.headers)

    async def invalid(_: Any, error: Any) -> Any:
        first = error.errors()[0]  # not its input, which quotes the request
        where = ".".join(map(str, first["loc"]))
        return JSONResponse(told(422, f"{where}: {first['msg']} (send it as Content-Type: application/json)"), 422)

    async def failed(_: Any, error: Exception) -> Any:
        return JSONResponse(told(500, f"the request failed: {type(error).__name__}; the server's log says more"), 500)

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, failed)
    return app


async def _answer(send: Any, refused: _Refused) -> None:
    body = json.dumps(told(refused.status, str(refused))).encode()
    head = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def checked(body: bytes, path: str) -> bytes:
    """The body to pass on. Raises _Refused for fields that would run a client's code, exceed limits, crash, or be
    silently ignored.
    """
    try:
        request = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise _Refused(400, "the body is not valid JSON") from None
    if not isinstance(request, dict):
        raise _Refused(400, "the body is not a JSON object")
    for name, kinds in _KINDS.items():
        value = request.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise _Refused(400, f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}")
    _refuse_unserved(request)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if request.get(name) is not None and request[name] < 1:
            raise _Refused(400, f"{name} must be at least 1")
    for name, (low, high) in _BOUNDS.items():
        value = request.get(name)
        if value is not None and not (low <= value <= high or (name == "temperature" and value == 0)):
            raise _Refused(400, f"{name} must be {'0, or ' if name == 'temperature' else ''}between {low} and {high}")
    if abs(request.get("seed") or 0) >= 1 << 63:
        raise _Refused(400, "seed must fit in 64 bits")
    if any(not isinstance(message, dict) or "role" not in message for message in request.get("messages") or ()):
        raise _Refused(400, "each of messages must be an object with a role")
    if request.get("generation_config") is not None:
        raise _Refused(400, "generation_config is not accepted: set temperature, top_p, max_tokens or stop instead")
    stops = [] if request.get("stop") is None else request["stop"]
    stops = [stops] if isinstance(stops, str) else stops
    known = isinstance(stops, list) and all(isinstance(stop, str) and 0 < len(stop) <= STOP_LENGTH for stop in stops)
    if not known or len(stops) > STOPS:
        raise _Refused(400, f"stop must be a string or up to {STOPS} of them, each of 1 to {STOP_LENGTH} characters")
    for name in sorted(set(request.get("chat_template_kwargs") or ()) & _arguments()):
        raise _Refused(400, f"chat_template_kwargs takes variables of the model's template, and {name} is not one")
    bias = request.get("logit_bias")
    if bias and not (isinstance(bias, dict) and all(_is_bias(*pair) for pair in bias.items())):
        raise _Refused(400, "logit_bias must map token ids to numbers between -100 and 100")
    needed = _NEEDED.get(path)
    if needed is not None and not request.get(needed):
        raise _Refused(400, f"{path} needs {needed}, which is missing or empty")
    changed: dict[str, Any] = {}
    if path == "/v1/responses" and request.get("stream") is None:
        changed["stream"] = False  # transformers would stream by default, which OpenAI's clients do not expect
    if bias:  # clients send integers here, and transformers accepts only floats
        changed["logit_bias"] = {token: float(value) for token, value in bias.items()}
    return json.dumps({**request, **changed}).encode() if changed else body


def _refuse_unserved(request: dict[str, Any]) -> None:
    """Raise _Refused for what transformers would silently ignore."""
    unserved = "is not supported by the transformers server: leave it out, or serve with vLLM"
    for name, values in _ONLY.items():
        if request.get(name) is not None and request[name] not in values:
            raise _Refused(400, f"{name}={json.dumps(request[name])[:80]} {unserved}")
    text = request.get("text")
    for name, form in (("response_format", request.get("response_format")), ("text.format", _get(text, "format"))):
        if form is not None and _get(form, "type") != "text":
            raise _Refused(400, f"{name} {json.dumps(form)[:80]} {unserved}; answers are plain text")
    items = request.get("input")
    for item in (*(request.get("messages") or ()), *(items if isinstance(items, list) else ())):
        content = _get(item, "content")
        for part in content if isinstance(content, list) else ():
            kind = _get(part, "type")
            if kind not in _TEXTS:
                raise _Refused(
                    400, f"a message part of type {json.dumps(kind)[:80]} {unserved}; messages are text only"
                )


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _is_bias(token: str, value: Any) -> bool:
    named = token.isascii() and token.isdecimal() and len(token) < 10
    return named and type(value) in (int, float) and abs(value) <= 100  # NaN is not


def _arguments() -> set[str]:
    """Arguments of ``apply_chat_template`` itself, among them one that replaces the model's template."""
    from transformers import PreTrainedTokenizerBase

    return {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"self", "kwargs"}


def sampling(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' ``_build_generation_config``, which samples only if the model's generation config does.

    A request that sets a temperature, or only ``top_p``, is sampled.
    """

    @functools.wraps(build)
    def built(self: Any, body: dict[str, Any], *rest: Any, **words: Any) -> Any:
        config, temperature = build(self, body, *rest, **words), body.get("temperature")
        if temperature or (temperature is None and body.get("top_p") is not None):
            config.do_sample = True
        return config

    return built


def bound(model: Any, tokenizer: Any, name: str, context: int) -> None:
    """Limit a model to ``context`` tokens of prompt and answer, and sandbox its chat template (``template``)."""
    from fastapi import HTTPException

    generate: Callable[..., Any] = model.generate
    apply: Callable[..., Any] = tokenizer.apply_chat_template

    def generate_within(*arguments: Any, **words: Any) -> Any:
        config, length = words["generation_config"], words["input_ids"].shape[-1]
        try:
            check_tokens(model, words["input_ids"], name)
        except CheckpointError as error:
            raise HTTPException(400, str(error)) from None
        if length >= context:
            raise HTTPException(400, f"the prompt has {length} tokens; prompt and answer together may have {context}")
        config.max_new_tokens = min(config.max_new_tokens or context, context - length)
        return generate(*arguments, **words)

    def apply_within(messages: Any, *, return_tensors: Any = None, **words: Any) -> Any:
        variables = {key: value for key, value in words.items() if key not in _arguments() or key == "tools"}
        try:
            text = render(apply, messages, name, **variables)
        except TextError as error:
            raise HTTPException(400, str(error)) from None
        return tokenizer(text, add_special_tokens=False, return_tensors=return_tensors)

    model.generate, tokenizer.apply_chat_template = generate_within, apply_within
