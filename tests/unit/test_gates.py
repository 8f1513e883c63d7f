"""A gate that is closed while an env arrives lets it pass."""

from __future__ import annotations

import os
import shutil

import pytest

from stepmill.testing import Gate
from stepmill.testing.gates import wait_at


@pytest.mark.parametrize("are_pipes_left", [False, True], ids=["removed", "before they are removed"])
@pytest.mark.parametrize("num_calls", [0, 1, 2, 3])
def test_a_gate_may_be_closed_at_any_moment_of_an_arrival(monkeypatch, num_calls, are_pipes_left):
    before = os.listdir("/proc/self/fd")
    gate = Gate()
    left = num_calls

    def closing(original):
        def call(*args, **options):
            nonlocal left
            left -= 1
            if left == -1:
                gate.close()
            return original(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "write", "read"):
            patch.setattr(os, name, closing(getattr(os, name)))
        if are_pipes_left:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        wait_at(gate.path)
    assert left < 0
    shutil.rmtree(gate.path, ignore_errors=True)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_closing_a_gate_with_all_the_tickets_that_its_pipe_takes_does_not_wait():
    with Gate() as gate:
        for _ in range(64):
            gate.open(1024)
