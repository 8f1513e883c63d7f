"""The folder of compiled kernels. Numba unpickles its files, so only the user may own and write them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
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
    user, and no other user may be able to write or replace them. Otherwise there is one warning.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "stepmill", "kernels").expanduser()
    top = Path(chosen).absolute() if chosen else default.absolute()
    folder = top / digest
    # With NUMBA_CACHE_DIR, Numba stores its files in a folder that it names, and not beside the source file.
    folders = [folder]
    if chosen:
        folders.append(top / _CacheLocator.get_suitable_cache_subpath(str(folder / ENTRY)))  # type: ignore[no-untyped-call]
    try:
        for path in [*reversed(top.parents), top, *folders]:
            path.mkdir(_PRIVATE, exist_ok=True)
        problem = next(_problems(top, folders), None)
    except OSError:
        return None
    if problem is not None:
        _warn_once(str(top), problem)
        return None
    return folder if all(os.access(path, os.W_OK) for path in folders) else None


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
