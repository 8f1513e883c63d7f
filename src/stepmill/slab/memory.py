"""The memory of a slab: descriptors that can be passed to another process. Nothing has a name, so nothing can leak one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from stepmill import _native
from stepmill.slab.layout import Layout, WritableParts
from stepmill.spec.errors import BusyEnvError, ClosedPoolError, EngineBug, UsageError

_native.register_errors(UsageError, BusyEnvError, ClosedPoolError, EngineBug)


@dataclass(eq=False)
class SharedSlab:
    """A slab and where its memory comes from.

    Attributes:
        plan: where everything lies; travels to the workers.
        fds: the slab's memfd, then each worker's command memfd and result memfd. Owned.
    """

    plan: Mapping[str, object]
    fds: list[int]
    _mapping: _native.Slab | None

    @property
    def native(self) -> _native.Slab:
        """The mapping in this process."""
        if self._mapping is None:
            raise ClosedPoolError("the pool is closed, and its memory given back; make a new one")
        return self._mapping

    @classmethod
    def create(cls, layout: Layout, num_workers: int) -> SharedSlab:
        """Make the memory, zeroed, with its header written.

        Raises:
            OSError: there is no memory or no descriptor left.
        """
        fds: list[int] = []
        try:
            fds.append(os.memfd_create("stepmill-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[0], layout.size_bytes)
            # A mapped file that shrinks would end the learner by SIGBUS.
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            for worker in range(num_workers):
                fds.append(os.memfd_create(f"stepmill-commands-{worker}", os.MFD_CLOEXEC))
                fds.append(os.memfd_create(f"stepmill-results-{worker}", os.MFD_CLOEXEC))
            native = attach(layout.plan, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        native.format()
        return cls(layout.plan, fds, native)

    def close(self) -> None:
        """Let go of the descriptors and the mapping, which lives until the last array that leans on it is gone."""
        self._mapping = None
        while self.fds:
            os.close(self.fds.pop())


def attach(plan: Mapping[str, object], fds: Sequence[int]) -> _native.Slab:
    """Map a slab from its descriptors, to read and write all of it.

    Raises:
        RuntimeError: it is not a slab of this version.
    """
    return _native.Slab(fds[0], dict(plan), list(fds[1::2]), list(fds[2::2]), _all_of(plan))


def attach_worker(plan: Mapping[str, object], fds: Sequence[int], worker: int, *, is_protected: bool) -> _native.Slab:
    """Map a slab for one worker, which uses its own words and rows only.

    Args:
        plan: of the slab.
        fds: as in `SharedSlab`; -1 for those of other workers.
        worker: whose mapping it is.
        is_protected: whether memory that is not the worker's can be read, but not written.

    Raises:
        RuntimeError: it is not a slab of this version.
    """
    writable = cast("WritableParts", plan["writable"]).ranges(worker) if is_protected else _all_of(plan)
    return _native.Slab(fds[0], dict(plan), list(fds[1::2]), list(fds[2::2]), writable, worker)


def _all_of(plan: Mapping[str, object]) -> list[tuple[int, int]]:
    return [(0, cast("int", plan["size_bytes"]))]
