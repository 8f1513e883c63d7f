"""Signal handlers run only where the code can handle their exceptions."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from stepmill.worker.signals import allow_signals, defer_signals, wait_event
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.interrupts import LineInterrupt


@pytest.fixture(autouse=True)
def restores_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_ctrl_c_is_raised_at_the_end_of_the_block():
    done = []

    def run() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("rest of the block")
        done.append("after the block")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_not_lost_when_the_block_raises_something_else():
    def run() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert isinstance(caught.value.__context__, ValueError)


def test_ctrl_c_that_came_before_is_raised_where_signals_are_allowed():
    done = []

    def run() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("before")
            with allow_signals():
                done.append("within")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["before"]


def test_ctrl_c_is_raised_at_once_where_signals_are_allowed_and_deferred_again_in_the_cleanup():
    done = []

    def run() -> None:
        with defer_signals(), defer_signals():
            try:
                with allow_signals():
                    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                    signal.raise_signal(signal.SIGINT)
                    done.append("not reached")
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("cleanup")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["cleanup"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_the_user_installs_where_signals_are_allowed_stays():
    came: list[int] = []
    with defer_signals():
        with allow_signals():
            signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
    assert came == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert len(came) == 2


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_two_handlers_that_raise_at_the_end_of_the_block_both_run_and_stay_installed():
    def stop(number: int, _: object) -> None:
        raise TimeoutError

    def run() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGALRM)

    signal.signal(signal.SIGALRM, stop)
    with pytest.raises(TimeoutError) as caught:
        run()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(TimeoutError):
        signal.raise_signal(signal.SIGALRM)


def test_a_signal_that_comes_after_ctrl_c_in_the_same_block_is_delivered_too():
    came: list[int] = []

    def run() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert came == [signal.SIGUSR1] * 2


def test_ctrl_c_anywhere_in_a_wait_for_an_event_leaves_the_event_usable():
    for line in itertools.count(1):
        event = threading.Event()
        was_raised = LineInterrupt(line).call(lambda event=event: wait_event(event, 1e-6))
        setter = threading.Thread(target=event.set, daemon=True)
        setter.start()
        setter.join(HANG_GUARD_S)
        assert not setter.is_alive(), f"the event's lock is held, after line {line}"
        if not was_raised:
            break
    assert line > 20


@pytest.mark.parametrize("block", [defer_signals, allow_signals])
def test_ctrl_c_anywhere_in_a_block_is_raised_once_and_leaves_the_handlers(
    block: Callable[[], AbstractContextManager[None]],
):
    def run() -> None:
        with defer_signals(), block():
            pass

    for line in itertools.count(1):
        was_raised = LineInterrupt(line).call(run)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        if not was_raised:
            break
    assert line > 10
