"""If a signal handler raises while an env runs in the learner's thread, the exception reaches the learner and is not the env's fault."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.external_pools import CountingPool, Script
from tests.harness.pools import begun

pytestmark = pytest.mark.timeout(120, method="thread")  # SIGALRM belongs to the tests here
NUM_SOAK_SIGNALS = 300
MAX_DELAY_S = 0.2


class StopTraining(Exception):
    """An exception class of the user's."""


def raise_in_callee(number: int, frame: FrameType | None) -> None:
    def callee() -> None:
        raise StopTraining(number)

    callee()


def raise_without_arguments(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise StopTraining


def raise_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise StopTraining


class Stopper:
    """Handlers that belong to an object."""

    def method(self, number: int, frame: FrameType | None) -> None:
        raise StopTraining

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise StopTraining


def raise_with_more(more: str, number: int, frame: FrameType | None) -> None:
    del number, frame
    raise StopTraining(more)


@functools.wraps(raise_in_callee)
def raise_wrapped(*arguments: Any) -> None:
    raise_in_callee(*arguments)


Handler = Callable[[int, "FrameType | None"], Any]
HANDLERS: dict[str, tuple[int, Handler, type[BaseException]]] = {
    "SIGINT": (signal.SIGINT, raise_in_callee, StopTraining),
    "SIGTERM": (signal.SIGTERM, lambda *_: sys.exit(3), SystemExit),
    "SIGALRM": (signal.SIGALRM, raise_wrapped, StopTraining),
    "default": (signal.SIGUSR1, signal.default_int_handler, KeyboardInterrupt),
    "arguments deleted": (signal.SIGUSR1, raise_without_arguments, StopTraining),
    "one shot": (signal.SIGUSR1, raise_once, StopTraining),
    "method": (signal.SIGUSR1, Stopper().method, StopTraining),
    "object": (signal.SIGUSR1, Stopper(), StopTraining),
    "partial": (signal.SIGUSR1, partial(raise_with_more, "more"), StopTraining),
}


@pytest.fixture(params=HANDLERS)
def handled(request: pytest.FixtureRequest) -> Iterator[tuple[int, type[BaseException]]]:
    """Install a handler; its signal, and what it raises."""
    number, handler, error = HANDLERS[request.param]
    before = signal.signal(number, handler)
    yield number, error
    signal.signal(number, before)


@pytest.fixture
def sigterm() -> Iterator[int]:
    before = signal.signal(signal.SIGTERM, raise_in_callee)
    yield signal.SIGTERM
    signal.signal(signal.SIGTERM, before)


def send_self(number: int) -> None:
    """Let the handler run here: at once, or for SIGALRM when the timer says so."""
    if number != signal.SIGALRM:
        os.kill(os.getpid(), number)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    # If another thread of this process receives the signal, CPython runs its handler only when this thread releases the GIL.
    while True:
        time.sleep(0.001)


class SignalledEnv(CountingEnv):
    """Sends its process a signal in `phase`, if it is armed."""

    is_armed = False

    def __init__(self, phase: str, number: int, identity: int = 0) -> None:
        super().__init__(identity, 5)
        self.phase = phase
        self.number = number

    def _send(self, phase: str) -> None:
        if SignalledEnv.is_armed and phase == self.phase:
            SignalledEnv.is_armed = False
            send_self(self.number)

    def reset(self, **arguments: Any) -> Any:
        self._send("reset")
        return super().reset(**arguments)

    def step(self, action: np.int64) -> Any:
        self._send("step")
        if SignalledEnv.is_armed and self.phase == "record":
            raise UnreadableError(self)
        obs, reward, terminated, truncated, info = super().step(action)
        if SignalledEnv.is_armed and self.phase == "flag":
            return obs, reward, SignallingFlag(self), truncated, info
        if SignalledEnv.is_armed and self.phase == "reward":
            return obs, SignallingFlag(self), terminated, truncated, info
        return obs, reward, terminated, truncated, info

    def signal_in_call(self) -> None:
        self._send("call")


class UnreadableError(Exception):
    """Its text cannot be read without a signal."""

    def __init__(self, env: SignalledEnv) -> None:
        self.env = env

    def __str__(self) -> str:
        self.env._send("record")
        return "read"


class SignallingFlag:
    """A value that cannot be read without a signal."""

    def __init__(self, env: SignalledEnv) -> None:
        self.env = env

    def __bool__(self) -> bool:
        self.env._send("flag")
        return False

    def __float__(self) -> float:
        self.env._send("reward")
        return 0.0


def serial_pool(phase: str, number: int, **options: Any) -> stepmill.Pool:
    env_fns = [CountingEnv, partial(SignalledEnv, phase, number, 1), CountingEnv]
    return stepmill.Pool(
        env_fns, backend="serial", options=stepmill.PoolOptions(**{"seeding": "per_episode", **options})
    )


def check_usable(pool: stepmill.Pool) -> None:
    pool.reset(seed=0)
    assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_a_handlers_exception_in_a_step_reaches_the_learner_under_every_policy(handled, policy: str):
    number, error = handled
    with begun(serial_pool("step", number, on_fault=policy)) as pool:
        pool.step([1, 2, 3])
        SignalledEnv.is_armed = True
        with pytest.raises(error) as caught:
            pool.step([1, 2, 3])
        assert type(caught.value) is error
        assert [state.name for state in pool.states] == ["READY", "FAULTED", "BUSY"]
        batch = pool.recv(2)
        assert (batch.env_id.tolist(), batch.reward.tolist()) == ([0, 2], [1.0, 3.0])
        check_usable(pool)


@pytest.mark.parametrize("phase", ["flag", "reward"])
def test_a_handlers_exception_in_what_a_step_returned_reaches_the_learner(sigterm: int, phase: str):
    with begun(serial_pool(phase, sigterm)) as pool:
        SignalledEnv.is_armed = True
        with pytest.raises(StopTraining):
            pool.step([1, 2, 3])
        assert pool.recv(2).env_id.tolist() == [0, 2]
        check_usable(pool)


def test_the_exception_arrives_with_the_traceback_of_handler_and_env(sigterm: int):
    with begun(serial_pool("step", sigterm)) as pool:
        SignalledEnv.is_armed = True
        with pytest.raises(StopTraining) as caught:
            pool.step([1, 2, 3])
        assert [entry.name for entry in caught.traceback][-4:] == ["_send", "send_self", "raise_in_callee", "callee"]


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_a_handlers_exception_in_a_reset_reaches_the_learner_and_the_reset_is_not_tried_again(handled, policy: str):
    number, error = handled
    with serial_pool("reset", number, on_fault=policy, resets={"retries": 3, "retry_wait_s": 0.0}) as pool:
        SignalledEnv.is_armed = True
        with pytest.raises(error):
            pool.reset(seed=0)
        assert [state.name for state in pool.states] == ["READY", "FAULTED", "BUSY"]
        assert pool.stats().workers[0].reset_retries == 0
        check_usable(pool)


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_a_handlers_exception_in_a_call_reaches_the_learner(handled, policy: str):
    number, error = handled
    with begun(serial_pool("call", number, on_fault=policy)) as pool:
        SignalledEnv.is_armed = True
        with pytest.raises(error):
            pool.call("signal_in_call", env_ids=[1])
        assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]


def test_a_handlers_exception_in_a_constructor_reaches_the_learner_and_closes_what_was_built(sigterm: int):
    closed: list[int] = []

    class ClosingEnv(CountingEnv):
        def close(self) -> None:
            closed.append(self.identity)

    def signal_itself() -> CountingEnv:
        send_self(sigterm)
        raise AssertionError

    with pytest.raises(StopTraining):
        stepmill.Pool([partial(ClosingEnv, 7), signal_itself], backend="serial")
    assert closed == [7]


def test_a_signal_while_the_record_of_an_envs_fault_is_made_loses_neither(sigterm: int):
    with begun(serial_pool("record", sigterm)) as pool:
        SignalledEnv.is_armed = True
        with pytest.raises(StopTraining):
            pool.step([1, 2, 3])
        with pytest.raises(stepmill.EnvError) as caught:
            pool.recv(3)
        assert caught.value.env_id == 1
        check_usable(pool)


class RaisingEnv(CountingEnv):
    """Raises in its step, after a signal was handled."""

    number = signal.SIGUSR1
    is_replacing = False

    def step(self, action: np.int64) -> Any:
        try:
            os.kill(os.getpid(), self.number)
        except StopTraining as error:
            if self.is_replacing:
                raise ValueError("the env's own") from error
        raise ValueError("the env's own")


@pytest.mark.parametrize("handler", [raise_in_callee, lambda *_: None])
@pytest.mark.parametrize("is_replacing", [False, True])
def test_an_exception_of_the_env_stays_its_fault_though_a_handler_ran(handler: Handler, is_replacing: bool):
    before = signal.signal(RaisingEnv.number, handler)
    RaisingEnv.is_replacing = is_replacing
    try:
        with stepmill.Pool([RaisingEnv], backend="serial") as pool:
            pool.reset(seed=0)
            with pytest.raises(stepmill.EnvError, match="the env's own"):
                pool.step([1])
    finally:
        signal.signal(RaisingEnv.number, before)


def test_a_pool_that_is_stepped_inside_of_a_handler_has_envs_with_faults_of_their_own():
    """The handler's frame is below the env's there, not above it."""
    errors: list[BaseException] = []

    def step_pool(number: int, frame: FrameType | None) -> None:
        try:
            pool.step([1])
        except BaseException as error:
            errors.append(error)

    class FailingEnv(CountingEnv):
        def step(self, action: np.int64) -> Any:
            raise ValueError("the env's own")

    before = signal.signal(signal.SIGUSR1, step_pool)
    try:
        with begun(stepmill.Pool([FailingEnv], backend="serial")) as pool:
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (error,) = errors
    assert isinstance(error, stepmill.EnvError)


# ---- a pool that is not ours, in line ----------------------------------------------------------------------------------


class SignalledScript(Script):
    """An external pool that sends its process a signal in `phase`, if it is armed."""

    phase = ""
    number = 0

    def make_pool(self, num_envs: int) -> Any:
        _, spec = super().make_pool(num_envs)
        return SignalledPool(num_envs, self), spec

    def send_in(self, phase: str) -> None:
        if phase == self.phase:
            self.phase = ""
            send_self(self.number)


class SignalledPool(CountingPool):
    """The pool of a `SignalledScript`."""

    def __init__(self, num_envs: int, script: SignalledScript) -> None:
        super().__init__(num_envs, script)
        self.script = script

    def send(self, servers: Any, actions: Any) -> None:
        self.script.send_in("send")
        super().send(servers, actions)

    def recv(self) -> Any:
        arrived = super().recv()
        self.script.send_in("recv")
        return arrived

    def reset(self, orders: Any) -> None:
        self.script.send_in("reset")
        super().reset(orders)

    def env_handle(self, server: int) -> Any:
        return self

    def signal_in_call(self) -> None:
        self.script.send_in("call")


def external_pool(script: SignalledScript, number: int, **options: Any) -> stepmill.Pool:
    script.number = number
    return stepmill.Pool([script] * 2, backend="envpool", options=stepmill.PoolOptions(**options))


@pytest.mark.parametrize("phase", ["send", "recv", "reset"])
@pytest.mark.parametrize("policy", ["raise", "truncate"])
def test_a_handlers_exception_reaches_the_learner_from_a_external_pool_in_line(handled, policy: str, phase: str):
    number, error = handled
    script = SignalledScript(length=9)
    with external_pool(script, number, on_fault=policy) as pool:
        pool.reset()
        script.phase = phase
        with pytest.raises(error):
            pool.reset() if phase == "reset" else pool.step([1, 1])
        with pytest.warns(RuntimeWarning, match="this reset drops its result"):
            pool.reset()
        assert pool.step([1, 1]).reward.tolist() == [1.0, 1.0]


def test_a_handlers_exception_reaches_the_learner_from_a_call_of_a_external_pool_in_line(handled):
    number, error = handled
    script = SignalledScript(length=9)
    with external_pool(script, number) as pool:
        pool.reset()
        script.phase = "call"
        with pytest.raises(error):
            pool.call("signal_in_call", env_ids=[1])
        assert pool.step([1, 1]).reward.tolist() == [1.0, 1.0]


# ---- many signals from outside -----------------------------------------------------------------------------------------


def send_signals(number: int, sent: list[float], is_over: threading.Event, is_handled: threading.Event) -> None:
    """Send a signal at a random moment, again and again, each after the one before was handled."""
    rng = np.random.default_rng(number)
    while not is_over.is_set():
        if is_handled.wait(0.1):
            is_handled.clear()
            time.sleep(rng.uniform(0.0, 0.01))
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)


def step_until_signalled(pool: stepmill.Pool, error: type[BaseException], is_handled: threading.Event) -> int:
    """Let the next signal come, and step until it does; return the number of steps."""
    num_steps = 0
    try:
        is_handled.set()
        pool.reset()
        while True:
            pool.step(np.ones(pool.num_envs, np.int64))
            num_steps += 1
    except error:
        return num_steps


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*this reset drops its result")
@pytest.mark.parametrize("where", ["serial", "external"])
def test_each_of_many_signals_at_random_moments_arrives_at_once_and_the_pool_goes_on(handled, where: str):
    number, error = handled
    handler = signal.getsignal(number)
    pool = serial_pool("", number) if where == "serial" else external_pool(SignalledScript(length=9), number)
    sent: list[float] = []
    delays: list[float] = []
    is_over, is_handled = threading.Event(), threading.Event()
    sender = threading.Thread(target=send_signals, args=(number, sent, is_over, is_handled))
    sender.start()
    num_steps = 0
    try:
        while len(delays) < NUM_SOAK_SIGNALS:
            signal.signal(number, handler)  # the one-shot handler is gone
            num_steps += step_until_signalled(pool, error, is_handled)
            delays.append(time.monotonic() - sent[-1])
    finally:
        is_over.set()
        sender.join()
    check_usable_anywhere(pool)
    pool.close()
    print(
        f"{where}, {error.__name__}: {len(delays)} signals, {num_steps} steps, longest delay {max(delays) * 1e3:.1f} ms"
    )
    assert max(delays) < MAX_DELAY_S
    assert num_steps > 0


def check_usable_anywhere(pool: stepmill.Pool) -> None:
    pool.reset()
    actions = np.ones(pool.num_envs, np.int64)
    assert pool.step(actions).reward.tolist() == actions.tolist()
