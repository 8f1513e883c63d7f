"""Finds the pools of running programs, and reads their counters. Nothing is written to them, and nothing waits for them.

A slab is a memfd without a name in a file system. The programs that have it open show it in /proc/PID/fd, where another
process of the same user may open it for reading. The description at its beginning says where the counters are.

Root also sees the memfds of other users, who can write anything into them. All that is read is therefore checked, and
nothing is mapped.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

from stepmill import _native
from stepmill.slab.counters import CounterReader, Description, read_header
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import UsageError
from stepmill.spec.stats import PoolStats

SLAB_LINK = "/memfd:stepmill-slab"
MAX_DESCRIPTION_BYTES = 1 << 24
MAX_COMMAND_BYTES = 4096
MAGIC = int.from_bytes(b"stepmill", "little")
PROC = Path("/proc")


@dataclass(frozen=True)
class PoolFile:
    """The slab of a pool, in the program that made it.

    Attributes:
        path: the path in /proc.
        inode: the inode of the slab, which differs from those of all other slabs.
        layout_version: the version of the slab's layout.
        description: the description in the slab; None if this stepmill has another version of the layout.
    """

    pid: int
    path: Path
    inode: int
    layout_version: int
    description: Description | None

    @property
    def command(self) -> str:
        """The command line of the program, on one line, with "\N{REPLACEMENT CHARACTER}" for what a terminal does not print; empty if it has ended."""
        with contextlib.suppress(OSError), (PROC / str(self.pid) / "cmdline").open("rb") as file:
            words = file.read(MAX_COMMAND_BYTES).replace(b"\0", b" ").decode(errors="replace").split()
            return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in " ".join(words))
        return ""


class _SlabFile(io.FileIO):
    """A slab that is read. If it were mapped, the program that made it could end this one (SIGBUS) by shortening it."""

    def __init__(self, path: Path) -> None:
        # Not blocking, because a program in a separate mount namespace can give a FIFO this name.
        super().__init__(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self.fileno(), part.stop - part.start, part.start)


def find_pools(pid: int | None = None) -> list[PoolFile]:
    """Return the pools of one program, or of all programs of this user, oldest first.

    Raises:
        UsageError: there is no such program, or it belongs to another user.
    """
    if pid is not None:
        return _sorted(_pools_of(pid, _open_files(pid)))
    found: list[PoolFile] = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(UsageError):
                found += _pools_of(int(folder.name), _open_files(int(folder.name)))
    return _sorted(found)


def _sorted(pools: list[PoolFile]) -> list[PoolFile]:
    return sorted(pools, key=lambda pool: (pool.description.began_ns if pool.description else 0, pool.pid))


def _open_files(pid: int) -> list[Path]:
    try:
        return sorted((PROC / str(pid) / "fd").iterdir())
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no process {pid}; `stepmill top` without a PID lists the programs with pools"
        ) from exc
    except PermissionError as exc:
        raise UsageError(f"process {pid} belongs to another user; run stepmill as that user") from exc


def _pools_of(pid: int, files: list[Path]) -> list[PoolFile]:
    """Return the pools that a program made. Its workers and its launcher have the slab open, too; they are left out."""
    found: dict[int, PoolFile] = {}
    for path in files:
        with contextlib.suppress(OSError, ValueError, OverflowError):  # the slab was closed meanwhile, or is incomplete
            if not str(path.readlink()).startswith(SLAB_LINK):
                continue
            pool = _read_pool(pid, path)
            if pool is not None and (pool.description is None or pool.description.pid == pid):
                found[pool.inode] = pool
    return list(found.values())


def _read_pool(pid: int, path: Path) -> PoolFile | None:
    with _SlabFile(path) as file:
        magic, version, offset, size_bytes = read_header(file)
        if magic != MAGIC or size_bytes > MAX_DESCRIPTION_BYTES:
            return None
        inode = os.fstat(file.fileno()).st_ino
        if version != _native.LAYOUT_VERSION:
            return PoolFile(pid, path, inode, version, None)
        return PoolFile(pid, path, inode, version, Description.decode(file[offset : offset + size_bytes]))


class AttachedPool(CloseAtEnd):
    """The counters of a pool in another program, or in this one. Use it as a context manager."""

    def __init__(self, file: PoolFile) -> None:
        """Open the slab for reading.

        Raises:
            UsageError: the slab has the layout of another version of stepmill, or the pool was closed meanwhile.
        """
        if file.description is None:
            raise UsageError(
                f"the pool of process {file.pid} has layout {file.layout_version}, but this stepmill reads layout "
                f"{_native.LAYOUT_VERSION}; run the stepmill of the environment of that program"
            )
        self.file = file
        self.description = file.description
        self._reader = CounterReader(file.description)
        try:
            self._slab = _SlabFile(file.path)
        except OSError as exc:
            raise UsageError(f"the pool of process {file.pid} was closed") from exc

    @property
    def is_open(self) -> bool:
        """Whether the program still has the pool."""
        try:
            return self.file.path.stat().st_ino == self.file.inode
        except OSError:
            return False

    def stats(self) -> PoolStats:
        """Return the current statistics. `leased_slots` and `replay_log_bytes` are not known outside of the program.

        Raises:
            UsageError: the memory is not that of a pool.
        """
        try:
            return self._reader.read(self._slab)
        except (ValueError, MemoryError) as exc:
            raise UsageError(f"process {self.file.pid} has a file that looks like a pool's memory, but is not") from exc

    def close(self) -> None:
        """Close the slab. The pool continues."""
        self._slab.close()


def only_pool(pid: int) -> PoolFile:
    """Return the pool of a program; the oldest if there are several.

    Raises:
        UsageError: the program has no pool, does not exist, or belongs to another user.
    """
    pools = find_pools(pid)
    if not pools:
        raise UsageError(f"process {pid} has no pool; `stepmill top` without a PID lists the programs with pools")
    return pools[0]
