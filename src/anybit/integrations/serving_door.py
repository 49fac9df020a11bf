"""Access control for ``transformers serve``: untrusted clients may only query the one model, within its context.

That server trusts its clients: a request may load any model, bring its own chat template (a program) or generation
config, and be of any size.
"""

import hmac
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

from anybit.errors import CheckpointError, TextError, printable
from anybit.integrations.template import render
from anybit.quantization.pipeline.modules import check_tokens

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
    "chat_template_kwargs": (dict,),
}
_BOUNDS = {"temperature": (1e-4, 100.0), "top_p": (0.0, 1.0), "frequency_penalty": (-0.99, 100.0)}
"""Beyond these, scores become inf or NaN; sampling from those triggers a device-side assert that kills the process."""
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
            body = checked(body)
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


async def _answer(send: Any, refused: _Refused) -> None:
    body = json.dumps({"detail": str(refused)}).encode()
    head = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def checked(body: bytes) -> bytes:
    """The body to pass on. Raises _Refused for fields that would run a client's code, exceed limits, or crash."""
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
    stops = request.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    known = isinstance(stops, list) and all(isinstance(stop, str) and 0 < len(stop) <= STOP_LENGTH for stop in stops)
    if not known or len(stops) > STOPS:
        raise _Refused(400, f"stop must be a string or up to {STOPS} of them, each of at most {STOP_LENGTH} characters")
    for name in sorted(set(request.get("chat_template_kwargs") or ()) & _arguments()):
        raise _Refused(400, f"chat_template_kwargs takes variables of the model's template, and {name} is not one")
    bias = request.get("logit_bias")
    if not bias:
        return body
    if not isinstance(bias, dict) or not all(_is_bias(*pair) for pair in bias.items()):
        raise _Refused(400, "logit_bias must map token ids to numbers between -100 and 100")
    # Clients send integers here, and transformers accepts only floats.
    return json.dumps({**request, "logit_bias": {token: float(value) for token, value in bias.items()}}).encode()


def _is_bias(token: str, value: Any) -> bool:
    named = token.isascii() and token.isdecimal() and len(token) < 10
    return named and type(value) in (int, float) and abs(value) <= 100  # NaN is not


def _arguments() -> set[str]:
    """Arguments of ``apply_chat_template`` itself, among them one that replaces the model's template."""
    from transformers import PreTrainedTokenizerBase

    return {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"self", "kwargs"}


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
