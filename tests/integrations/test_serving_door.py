"""What requests to `transformers serve` may contain, without a server: fields, sizes, keys, lengths and templates."""

import asyncio
import json
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.hf import serving_door, template
from anybit.hf.serving_door import BODY, STOPS, Door

CHAT, TEXT, ANSWERS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WHOLE = b'{"messages": [{"role": "user", "content": "Hi"}]}'


class Asked:
    """An app that records the bodies that reach it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.bodies: list[bytes] = []
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        if self._error is not None:
            raise self._error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def ask(app: Any, *parts: bytes, path: str = CHAT, method: str = "POST", **headers: str) -> tuple[int, str]:
    """(status, error message) of one request sent in parts; 0 if there is no response."""
    head = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    rest = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    rest.append({"type": "http.request", "body": b""})
    sent: list[Any] = []

    async def receive() -> Any:
        return rest.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(
        app({"type": "http", "method": method, "path": path, "headers": head, "query_string": b""}, receive, send)
    )
    if not sent:
        return 0, ""
    return sent[0]["status"], json.loads(sent[1]["body"] or b"{}").get("error", {}).get("message", "")


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"generation_config": '{"num_beams": 1000}'}, "generation_config is not accepted"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "and chat_template is not one"),
        ({"chat_template_kwargs": {"tokenize": False}}, "and tokenize is not one"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be dict"),
        ({"max_tokens": "\x1b[31m"}, "max_tokens must be int"),
        ({"max_tokens": True}, "max_tokens must be int"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
        ({"seed": 1 << 70}, "seed must fit in 64 bits"),
        ({"temperature": "hot"}, "temperature must be int or float"),
        ({"temperature": 1e-40}, "temperature must be 0, or between 0.0001 and 100.0"),
        ({"temperature": float("nan")}, "temperature must be 0, or"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias must map token ids to numbers between -100 and 100"),
        ({"logit_bias": {"-5": 1}}, "logit_bias must map token ids"),
        ({"logit_bias": [5]}, "logit_bias must map token ids"),
        ({"top_p": 1.5}, "top_p must be between 0.0 and 1.0"),
        ({"frequency_penalty": 1e300}, "frequency_penalty must be between -0.99 and 100.0"),
        ({"messages": "x"}, "messages must be list"),
        ({"messages": ["x"]}, "each of messages must be an object with a role"),
        ({"prompt": [1]}, "prompt must be str"),
        ({"stop": ["x"] * (STOPS + 1)}, "stop must be a string or up to 16"),
        ({"stop": "x" * 5000}, "stop must be a string or up to 16"),
        ({"stop": [3]}, "stop must be a string or up to 16"),
        ({"stop": ""}, "each of 1 to 256 characters"),
        ({"n": 2}, "n=2 is not supported by the transformers server: leave it out, or serve with vLLM"),
        ({"best_of": 3}, "best_of=3 is not supported"),
        ({"logprobs": True}, "logprobs=true is not supported"),
        ({"top_logprobs": 5}, "top_logprobs=5 is not supported"),
        ({"echo": True}, "echo=true is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
        ({"tool_choice": "required"}, 'tool_choice="required" is not supported'),
        ({"functions": []}, "functions=[] is not supported"),
        ({"response_format": {"type": "json_object"}}, 'response_format {"type": "json_object"} is not supported'),
        ({"text": {"format": {"type": "json_schema"}}}, 'text.format {"type": "json_schema"} is not supported'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'a message part of type "image_url" is not',
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'a message part of type "input_image" is not',
        ),
        ({"input": 3}, "input must be str or list"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], detail: str) -> None:
    app = Asked()
    status, said = ask(Door(app), json.dumps(fields).encode())
    assert status == 400 and detail in said and said.isprintable() and not app.bodies


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt"), (ANSWERS, "input")])
def test_a_request_that_asks_nothing_is_told_what_is_missing(path: str, field: str) -> None:
    app = Asked()
    for fields in ({}, {field: None}, {field: [] if field == "messages" else ""}):
        status, said = ask(Door(app), json.dumps(fields).encode(), path=path)
        assert (status, said) == (400, f"{path} needs {field}, which is missing or empty") and not app.bodies


def test_fields_that_ask_for_nothing_more_get_through() -> None:
    fields = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}, "user": "me"}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    text = json.dumps({**fields, **parts, "tool_choice": "auto", "stop": None}).encode()
    assert ask(Door(Asked()), text) == (200, "")


def test_answers_are_streamed_only_where_that_is_asked_for() -> None:
    app = Asked()
    for fields in ({}, {"stream": True}, {"stream": False}):
        assert ask(Door(app), json.dumps({"input": "Hi", **fields}).encode(), path=ANSWERS)[0] == 200
    assert [json.loads(body)["stream"] for body in app.bodies] == [False, True, False]


@pytest.mark.parametrize(
    ("fields", "samples"),
    [({}, False), ({"temperature": 0, "top_p": 0.5}, False), ({"temperature": 0.7}, True), ({"top_p": 0.5}, True)],
)
def test_requests_with_a_temperature_are_sampled(fields: dict[str, Any], samples: bool) -> None:
    build = serving_door.sampling(lambda handler, body, settings: settings)
    assert build(None, fields, SimpleNamespace(do_sample=False)).do_sample is samples


def test_errors_have_the_form_that_openai_s_clients_read() -> None:
    fastapi = pytest.importorskip("fastapi")
    served = serving_door.tell_as_openai(fastapi.FastAPI())

    @served.post(CHAT)
    async def answer(body: dict[str, Any]) -> None:
        if body["messages"][0]["content"] == "Hi":
            raise fastapi.HTTPException(400, "the prompt is too long")
        raise KeyError("secret")

    app, kind = Door(served), {"content_type": "application/json"}
    assert ask(app, WHOLE, **kind) == (400, "the prompt is too long")
    assert (
        ask(app, WHOLE.replace(b"Hi", b"Ho"), **kind)[1] == "the request failed: KeyError; the server's log says more"
    )
    assert "send it as Content-Type: application/json" in ask(app, WHOLE, content_type="text/plain")[1]
    assert ask(app, b"{")[1] == "the body is not valid JSON"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"[]", b"3", b'{"a": ' + b"9" * 6000 + b"}", b"\xff"])
def test_bodies_that_are_none(body: bytes) -> None:
    app = Asked()
    assert ask(Door(app), body)[0] == 400 and not app.bodies


def test_what_is_right_gets_through_whole() -> None:
    app = Asked()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "seed": -1, "temperature": 0, "stop": "x"}
    text = json.dumps({**body, "chat_template_kwargs": {"enable_thinking": False}}).encode()
    assert ask(Door(app), text[:10], text[10:]) == (200, "") and app.bodies == [text]
    assert ask(Door(app), path="/health", method="GET") == (200, "")


def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    app = Asked()
    assert ask(Door(app), content_length=str(BODY + 1)) == (413, "a request may have at most 8 MiB")
    assert ask(Door(app), content_length="9" * 5000)[0] == 413
    assert ask(Door(app), *[b"a" * (BODY // 4)] * 50)[0] == 413
    assert not app.bodies


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions", "/docs", "/"])
def test_routes_that_load_read_or_unload_are_not_there(path: str) -> None:
    app = Asked()
    for method in ("GET", "POST"):
        assert ask(Door(app), b"{}", path=path, method=method)[0] == 404
    assert not app.bodies


def test_whole_numbers_of_a_bias_are_passed_on_as_transformers_takes_them() -> None:
    app = Asked()
    assert ask(Door(app), b'{"logit_bias": {"5": -100}, "prompt": "x"}', path=TEXT)[0] == 200
    assert json.loads(app.bodies[0]) == {"logit_bias": {"5": -100.0}, "prompt": "x"} and b"-100.0" in app.bodies[0]


def test_a_key_is_asked_for() -> None:
    app = Asked()
    door = Door(app, "secret")
    for given in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer secret2"}, {"authorization": "\xff"}):
        status, said = ask(door, b"{}", **given)
        assert status == 401 and "secret" not in said
    assert ask(door, WHOLE, authorization="Bearer secret")[0] == 200
    assert ask(door, path="/health", method="GET")[0] == 200


def test_what_fails_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ask(Door(Asked(KeyError("\x1b[31m\nINFO: all is well"))), WHOLE) == (0, "")
    (record,) = caplog.records
    assert record.getMessage().isprintable() and "KeyError" in record.getMessage() and record.exc_info is None


def model(seen: list[int]) -> Any:
    def generate(**words: Any) -> str:
        seen.append(words["generation_config"].max_new_tokens)
        return "answer"

    return SimpleNamespace(generate=generate, get_input_embeddings=lambda: torch.nn.Embedding(10, 2))


def test_prompts_and_answers_stay_within_the_context() -> None:
    fastapi = pytest.importorskip("fastapi")
    seen: list[int] = []
    served = model(seen)
    serving_door.bound(served, SimpleNamespace(apply_chat_template=None), "m", 100)
    for asked in (10**12, 7, None):
        settings = SimpleNamespace(max_new_tokens=asked)
        assert served.generate(input_ids=torch.zeros(1, 60), generation_config=settings) == "answer"
    assert seen == [40, 7, 40]
    with pytest.raises(
        fastapi.HTTPException, match="the prompt has 100 tokens; prompt and answer together may have 100"
    ):
        served.generate(input_ids=torch.zeros(1, 100), generation_config=SimpleNamespace(max_new_tokens=1))
    with pytest.raises(fastapi.HTTPException, match="the tokenizer of m gives token 10, but the model has only 10"):
        served.generate(input_ids=torch.tensor([[3, 10]]), generation_config=SimpleNamespace(max_new_tokens=1))


def test_a_template_is_rendered_beside_more_open_files_than_select_knows() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert template.render(lambda messages, **words: "Hi", [], "m") == "Hi"
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_model_s_own_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fastapi = pytest.importorskip("fastapi")
    from transformers.utils.chat_template_utils import render_jinja_template

    monkeypatch.setattr(template, "SECONDS", 1.0)

    class Tokenizer:
        source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ more }}"

        def apply_chat_template(self, messages: Any, tokenize: bool, **words: Any) -> Any:
            assert not tokenize
            return render_jinja_template([messages], chat_template=self.source, **words)[0][0]

        def __call__(self, text: str, **words: Any) -> Any:
            assert words == {"add_special_tokens": False, "return_tensors": "pt"}
            return text

    tokenizer = Tokenizer()
    serving_door.bound(model([]), tokenizer, "m", 100)
    messages, words = (
        [{"role": "user", "content": "Hi "}],
        {"return_tensors": "pt", "return_dict": True, "tokenize": True},
    )
    assert tokenizer.apply_chat_template(messages, tools=None, more="there", **words) == "Hi there"
    Tokenizer.source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(fastapi.HTTPException, match="the chat template of m takes more than 1 s"):
        tokenizer.apply_chat_template(messages, tools=None, **words)
