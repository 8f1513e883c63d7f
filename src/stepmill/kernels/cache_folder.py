"""The folder of compiled kernels. Numba unpickles its files, so only the user may own and write them."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from numba.core.caching import _CacheLocator

from stepmill.spec.notices import warn

ENTRY = "entry.py"
_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_cache(digest: str) -> Path | None:
    """Return the directory of one kernel, which is made if it is missing; None if it cannot be made, written to or trusted.

    It is below `$NUMBA_CACHE_DIR`, or `$XDG_CACHE_HOME/stepmill/kernels`. It and its files must belong to the effective
    user, and no other user may be able to write or replace them. Otherwise there is one warning. Compiled code that is damaged is
    removed.
    """
    folders = _folders(digest)
    folder, top = folders[0], folders[0].parent
    try:
        for path in [*reversed(top.parents), top, *folders]:
            path.mkdir(_PRIVATE, exist_ok=True)
        problem = next(_problems(top, folders), None)
        if problem is None:
            _remove_damaged(folders)
    except OSError:
        return None
    if problem is not None:
        _warn_once(str(top), problem)
        return None
    return folder if all(os.access(path, os.W_OK) for path in folders) else None


def write_checksums(digest: str) -> None:
    """Write the checksum of each compiled file of a kernel that has none. Files that cannot have one are compiled again."""
    with suppress(OSError):  # the disk is full, for example
        for code, checksum in _checksums(_folders(digest)):
            if not checksum.exists():
                fresh = checksum.with_name(f"{checksum.name}.{secrets.token_hex(8)}")
                fresh.write_text(_checksum(code))
                fresh.replace(checksum)


def _remove_damaged(folders: Iterable[Path]) -> None:
    """Remove compiled files that are not those of their checksums, because damaged code would end the process."""
    for code, checksum in _checksums(folders):
        if not checksum.exists() or checksum.read_text() != _checksum(code):
            code.unlink(missing_ok=True)
            checksum.unlink(missing_ok=True)


def _folders(digest: str) -> list[Path]:
    """Return the directory of a kernel, and the one in which Numba stores its files if that is another."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "stepmill", "kernels").expanduser()
    top = Path(chosen).absolute() if chosen else default.absolute()
    folder = top / digest
    if not chosen:
        return [folder]
    return [folder, top / _CacheLocator.get_suitable_cache_subpath(str(folder / ENTRY))]  # type: ignore[no-untyped-call]


def _checksums(folders: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return each compiled file, and the file of its checksum."""
    return [(code, code.with_suffix(".sha256")) for folder in folders for code in folder.rglob("*.nbc")]


def _checksum(code: Path) -> str:
    return hashlib.sha256(code.read_bytes()).hexdigest()


def _problems(top: Path, folders: Iterable[Path]) -> Iterator[str]:
    """Yield why folders cannot be trusted. A user who can write a folder can rename its files, unless it is sticky."""
    me = os.geteuid()
    for path in {*top.parents, *top.resolve().parents}:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"others can write {path}"
    found = top.stat()
    if found.st_uid not in (me, 0):
        yield f"{top} belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        yield f"others can write {top}"
    for folder in folders:
        is_private = stat.S_IMODE(folder.lstat().st_mode) == _PRIVATE
        for path in (folder, *folder.rglob("*")):
            found = path.lstat()
            if found.st_uid != me:
                yield f"{path} belongs to user {found.st_uid}"
            if stat.S_ISLNK(found.st_mode):
                yield f"{path} is a link"
            elif found.st_mode & _OTHERS_WRITE and not is_private:
                yield f"others can write {path}"


@cache
def _warn_once(folder: str, problem: str) -> None:
    warn(
        f"kernels are compiled again in each process, without the cache {folder}, because {problem}, and its files are code that "
        "would run as you; set NUMBA_CACHE_DIR to a folder that only you can write to, or use chmod go-w"
    )
