"""Prometheus ``/metrics`` for a server without them: requests done and running, times to first byte and to the end."""

import time
from collections import Counter, defaultdict
from typing import Any

KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Paths with their own labels: paths that clients make up must not create new time series."""


class Metrics:
    """ASGI middleware that measures requests and answers /metrics itself."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._finished: Counter[tuple[str, int]] = Counter()
        self._running = 0
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._first: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == "/metrics":
            head = [(b"content-type", b"text/plain; version=0.0.4")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": self.text().encode()})
        else:
            await self._measured(scope, receive, send)

    async def _measured(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["path"] in KNOWN else "other"
        begin, status, begun = time.perf_counter(), 499, False  # 499: the client left before any response

        async def passed_on(message: Any) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not begun and message.get("body"):
                begun = True
                self._first[path] += 1
                self._seconds["first_byte", path] += time.perf_counter() - begin
            await send(message)

        self._running += 1
        try:
            await self._app(scope, receive, passed_on)
        except Exception:
            status = 500
            raise
        finally:
            self._running -= 1
            self._finished[path, status] += 1
            self._seconds["request", path] += time.perf_counter() - begin

    def text(self) -> str:
        """Current metrics in Prometheus' text format."""
        lines = ["# TYPE anybit_requests_running gauge", f"anybit_requests_running {self._running}"]
        lines.append("# TYPE anybit_requests_total counter")
        lines += [
            f'anybit_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._finished.items())
        ]
        ends: Counter[str] = Counter()
        for (path, _), count in self._finished.items():
            ends[path] += count
        for name, counts in (("first_byte", self._first), ("request", ends)):
            lines.append(f"# TYPE anybit_{name}_seconds summary")
            for path, count in sorted(counts.items()):
                lines.append(f'anybit_{name}_seconds_sum{{path="{path}"}} {self._seconds[name, path]:.6f}')
                lines.append(f'anybit_{name}_seconds_count{{path="{path}"}} {count}')
        return "\n".join(lines) + "\n"
