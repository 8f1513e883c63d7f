"""Requests: their effect on envs, their order, and the errors that envs raise in them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from stepmill.spec.errors import UsageError
from stepmill.testing.faulty import ERRORS
from stepmill.worker.calls import UnreadablePayload, call_payload, serve_request, set_payload
from stepmill.worker.error_records import MAX_TEXT, describe_error, env_error
from stepmill.worker.messages import Outcome, Request, RequestKind, Value, dump, load


@dataclass
class FakeLoop:
    """Notes what it is asked."""

    log: list[tuple[object, ...]] = field(default_factory=list)

    def run_until(self, local: int, after_ticket: int) -> None:
        self.log.append(("run", local, after_ticket))

    def refresh(self) -> None:
        self.log.append(("refresh",))

    def restart_early_reset(self, local: int) -> None:
        self.log.append(("begin again", local))


class Plain:
    """An env without wrappers."""

    def __init__(self, name: str = "plain", log: list[tuple[object, ...]] | None = None) -> None:
        self.name = name
        self.log = log if log is not None else []

    def greet(self, greeting: str, mark: str = ".") -> str:
        self.log.append(("greet", self.name))
        return f"{greeting} {self.name}{mark}"

    def raise_named(self, error: str) -> None:
        exception = ERRORS[error]()
        raise exception

    def render(self) -> str:
        return f"picture of {self.name}"


class Wrapped(Plain):
    """An env that offers Gymnasium's way through wrappers."""

    def __init__(self) -> None:
        super().__init__("inner")
        self.hidden = {"depth": 3}

    def get_wrapper_attr(self, name: str) -> object:
        return self.hidden[name] if name in self.hidden else getattr(self, name)

    def set_wrapper_attr(self, name: str, value: int) -> None:
        self.hidden[name] = value


def ask(kind: RequestKind, payload: object, *envs: object) -> tuple[Outcome, ...]:
    places = tuple(range(len(envs)))
    return serve_request(FakeLoop(), envs, Request(1, kind, places, (0,) * len(envs), payload)).outcomes


def value_of(outcome: Outcome) -> object:
    assert isinstance(outcome, Value), outcome
    return outcome.value


def test_a_request_runs_after_the_commands_before_it_and_is_followed_by_a_refresh() -> None:
    loop = FakeLoop()
    envs = [Plain(str(place), loop.log) for place in range(3)]
    payload = call_payload("greet", ("hi",))
    reply = serve_request(loop, envs, Request(7, RequestKind.CALL, (2, 0), (5, 6), payload))
    assert reply.id == 7
    assert reply.outcomes == (Value("hi 2."), Value("hi 0."))
    before = [("run", 2, 5), ("begin again", 2), ("run", 0, 6), ("begin again", 0)]
    assert loop.log == [*before, ("greet", "2"), ("greet", "0"), ("refresh",)]


def test_a_call_passes_arguments_and_returns_an_attribute_that_is_no_method() -> None:
    assert ask(RequestKind.CALL, call_payload("greet", ("bye",), {"mark": "!"}), Plain()) == (Value("bye plain!"),)
    assert ask(RequestKind.CALL, call_payload("name"), Plain()) == (Value("plain"),)


def test_attributes_are_read_and_set_through_wrappers_where_the_env_offers_it() -> None:
    wrapped, plain = Wrapped(), Plain()
    assert ask(RequestKind.GET_ATTR, "depth", wrapped) == (Value(3),)
    outcomes = ask(RequestKind.SET_ATTR, set_payload("depth", [4, 5]), wrapped, plain)
    assert outcomes == (Value(None), Value(None))
    assert wrapped.hidden == {"depth": 4}
    assert vars(plain)["depth"] == 5


def test_rendering_calls_render() -> None:
    assert ask(RequestKind.RENDER, None, Plain("a"), Plain("b")) == (Value("picture of a"), Value("picture of b"))


def test_one_env_that_raises_does_not_keep_the_others_from_answering() -> None:
    bare, greeter = object(), Plain()
    failed, fine = ask(RequestKind.CALL, call_payload("greet", ("hi",)), bare, greeter)
    assert value_of(fine) == "hi plain."
    assert not isinstance(failed, Value)
    assert failed["type"] == "AttributeError"
    assert failed["phase"] == "call"


@pytest.mark.parametrize("error", sorted(ERRORS))
def test_every_exception_becomes_a_record_that_travels(error: str) -> None:
    (outcome,) = ask(RequestKind.CALL, call_payload("raise_named", (error,)), Plain())
    assert not isinstance(outcome, Value)
    assert load(dump(outcome)) == outcome
    assert set(outcome) == {"phase", "type", "message", "traceback"}
    assert all(type(text) is str for text in outcome.values())
    assert "raise_named" in outcome["traceback"]
    outcome["message"].encode()
    assert len(outcome["message"]) < MAX_TEXT + 100


def test_an_exception_that_the_caller_owns_passes() -> None:
    request = Request(1, RequestKind.CALL, (0,), (0,), call_payload("raise_named", ("keyboard",)))
    with pytest.raises(KeyboardInterrupt):
        serve_request(FakeLoop(), [Plain()], request, should_raise=lambda error: isinstance(error, KeyboardInterrupt))


def test_a_payload_that_could_not_be_loaded_is_every_envs_answer() -> None:
    outcomes = ask(RequestKind.CALL, UnreadablePayload(ImportError("no module named nowhere")), Plain(), Plain())
    assert [outcome["type"] for outcome in outcomes if not isinstance(outcome, Value)] == ["ImportError"] * 2


def test_a_request_that_takes_step_away_is_told_and_not_fatal() -> None:
    class Broken(FakeLoop):
        def refresh(self) -> None:
            raise AttributeError("no attribute 'step'")

    reply = serve_request(Broken(), [Plain()], Request(1, RequestKind.RENDER, (0,), (0,), None))
    assert not isinstance(reply.outcomes[0], Value)
    assert "step" in reply.outcomes[0]["message"]


@pytest.mark.parametrize("name", ["step", "reset", "close"])
def test_calls_that_would_bypass_the_engine_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        call_payload(name)


def test_arguments_are_not_shared_with_the_request() -> None:
    kwargs: dict[str, object] = {"mark": "!"}
    payload = call_payload("greet", ("hi",), kwargs)
    kwargs.clear()
    assert ask(RequestKind.CALL, payload, Plain()) == (Value("hi plain!"),)


def test_a_record_becomes_an_error_with_its_three_parts() -> None:
    try:
        raise OverflowError("too much")
    except OverflowError as exc:
        error = env_error(describe_error(exc, "step"), 4)
    assert error.env_id == 4
    assert error.phase == "step"
    assert error.error_type == "OverflowError"
    assert "env 4 raised OverflowError in step: too much" in str(error)
    assert "test_a_record_becomes_an_error" in error.remote_traceback
