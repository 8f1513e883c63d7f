"""Envs that wait until a test lets them continue: synchronisation without sleeping.

```
 test process                          env, in any process or thread
   gate.wait_arrivals(n)  ◄── byte ──  arrives, writes one byte
   gate.open(n)           ── byte ──►  reads one byte, continues
```
Both directions are named pipes in a temporary directory, which a worker finds by its path and need not inherit.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.closing import CloseAtEnd
from stepmill.testing.envs import CountingEnv, Info, Options

GATED_ACTION = 99
"""The action that makes a `GateEnv` wait; with other actions it does not wait."""
_CLOSED = (errno.ENOENT, errno.ENXIO, errno.EPIPE)  # the errors of pipes of a closed gate


class Gate(CloseAtEnd):
    """A semaphore that starts at 0. A test makes and opens it, and envs wait for it. Use it as a context manager."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="stepmill-gate-"))
        for name in ("arrivals", "tickets"):
            os.mkfifo(self.path / name)
        # Opened for reading and writing, so that neither side waits until the other opens its end.
        self._arrivals = os.open(self.path / "arrivals", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._tickets = os.open(self.path / "tickets", os.O_RDWR | os.O_CLOEXEC)

    def open(self, count: int = 1) -> None:
        """Let `count` envs pass, whether they wait already or arrive later."""
        os.write(self._tickets, b"t" * count)

    def wait_arrivals(self, count: int = 1, *, timeout_s: float = 30.0) -> None:
        """Wait until `count` more envs have arrived at the gate.

        Raises:
            TimeoutError: fewer arrived within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        missing = count
        while missing:
            readable, _, _ = select.select([self._arrivals], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError(f"{missing} of {count} envs did not arrive at the gate within {timeout_s} s")
            missing -= len(os.read(self._arrivals, missing))

    def close(self) -> None:
        """Open the gate permanently, and remove the pipes. Idempotent."""
        if self._tickets < 0:
            return
        os.set_blocking(self._tickets, False)
        with suppress(BlockingIOError):  # there are more tickets than the pipe takes
            self.open(1000)  # children that were forked have the other end, too
        os.close(self._arrivals)
        os.close(self._tickets)
        self._arrivals = self._tickets = -1
        shutil.rmtree(self.path, ignore_errors=True)


def wait_at(path: str | os.PathLike[str]) -> None:
    """Arrive at the gate at `path`, and wait until it lets the caller pass. Releases the GIL. Return if the gate is closed."""
    # The gate may be closed between any two of these calls. No open may block then, and a read of closed pipes ends at once.
    with ExitStack() as stack:
        try:
            arrivals = os.open(Path(path) / "arrivals", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, arrivals)
            tickets = os.open(Path(path) / "tickets", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, tickets)
            os.set_blocking(tickets, True)
            os.write(arrivals, b"a")
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
        else:
            os.read(tickets, 1)


class GateEnv(CountingEnv):
    """A counting env that waits at the gate in a step with `GATED_ACTION` or a reset with options {"gate": True}."""

    def __init__(self, path: str | os.PathLike[str], identity: int = 0, length: int = 5) -> None:
        super().__init__(identity, length)
        self._path = os.fspath(path)

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.int64], Info]:
        if options and options.get("gate"):
            wait_at(self._path)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        if action == GATED_ACTION:
            wait_at(self._path)
        return super().step(action)

    def wait_here(self) -> int:
        """Wait at the gate, and return the identity. Call it with `Pool.call`."""
        wait_at(self._path)
        return self.identity
