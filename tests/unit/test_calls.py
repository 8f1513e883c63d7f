"""Requests: their order among the commands, and what the engine does around them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from stepmill.spec.errors import UsageError
from stepmill.testing.faulty import ERRORS
from stepmill.worker.calls import call_payload, serve_request
from stepmill.worker.error_records import MAX_TEXT, describe_error
from stepmill.worker.messages import Reply, Request, RequestKind, Value, dump, load


@dataclass
class FakeLoop:
    """Notes what it is asked, beside what its envs are."""

    log: list[tuple[object, ...]] = field(default_factory=list)

    def run_until(self, local: int, after_ticket: int) -> None:
        self.log.append(("run", local, after_ticket))

    def refresh(self) -> None:
        self.log.append(("refresh",))

    def restart_early_reset(self, local: int) -> None:
        self.log.append(("begin again", local))


def greet(loop: FakeLoop) -> Reply:
    envs = [f"env {place}" for place in range(3)]

    def greet_env(env: object, greeting: str) -> str:
        loop.log.append(("greet", env))
        return f"{greeting} {env}"

    return serve_request(loop, envs, Request(7, RequestKind.CALL, (2, 0), (5, 6), call_payload(greet_env, ("hi",))))


def test_a_request_runs_after_the_commands_before_it_and_is_followed_by_a_refresh() -> None:
    loop = FakeLoop()
    assert greet(loop) == Reply(7, (Value("hi env 2"), Value("hi env 0")))
    before = [("run", 2, 5), ("begin again", 2), ("run", 0, 6), ("begin again", 0)]
    assert loop.log == [*before, ("greet", "env 2"), ("greet", "env 0"), ("refresh",)]


def test_a_request_that_takes_step_away_is_told_and_not_fatal() -> None:
    class Broken(FakeLoop):
        def refresh(self) -> None:
            raise AttributeError("no attribute 'step'")

    for outcome in greet(Broken()).outcomes:
        assert not isinstance(outcome, Value)
        assert "step" in outcome["message"]


@pytest.mark.parametrize("error", sorted(ERRORS))
def test_every_exception_becomes_a_record_that_travels(error: str) -> None:
    record = describe_error(ERRORS[error](), "call")
    assert load(dump(record)) == record
    assert set(record) == {"phase", "type", "message", "traceback"}
    assert all(type(text) is str for text in record.values())
    record["message"].encode()
    assert len(record["message"]) < MAX_TEXT + 100


@pytest.mark.parametrize("name", ["step", "reset", "close"])
def test_calls_that_would_bypass_the_engine_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        call_payload(name)
