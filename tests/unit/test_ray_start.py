"""The limit of a start on a Ray cluster counts from when Ray has started the processes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from stepmill.backends.ray.backend import REPLY_SLACK_S, RayBackend
from stepmill.backends.ray.node_link import NodeLink
from stepmill.worker.messages import WorkerSettings


class SlowLink:
    """A node whose process takes 90 s to start, on a clock that the test sets."""

    workers = (0,)
    actor = SimpleNamespace(ping=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: "begun")))
    start_ref = "built"

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.limits: dict[str, float] = {}
        self.started: Any = None

    def wait(self, ref: str, timeout_s: float) -> Any:
        self.limits[ref] = timeout_s
        self._clock[0] += 90.0 if ref == "begun" else 30.0
        return SimpleNamespace(reports=())


def test_the_limit_counts_from_when_ray_has_started_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    backend = object.__new__(RayBackend)
    backend._settings = WorkerSettings(start_timeout_s=100.0)
    link: Any = SlowLink(clock)
    links: list[NodeLink] = [link]
    backend._wait_started(links)
    assert link.limits == {"begun": 100.0, "built": 100.0 + REPLY_SLACK_S}
