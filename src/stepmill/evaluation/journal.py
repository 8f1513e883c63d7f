"""The file of an evaluation that can continue after it was killed: a line about the evaluation, and a line per finished episode."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, get_args, get_origin, get_type_hints

from stepmill import UsageError
from stepmill.evaluation.result import Episode, dump_json

_MARK = b'{"stepmill_evaluation"'
_opening = threading.Lock()
_open_files: set[tuple[int, int, int]] = set()  # of all journals of this process; guarded by _opening

_HINTS = get_type_hints(Episode)  # of the fields of an episode in a file


class Journal:
    """Reads the episodes that are in the file, and appends others. With `path` None it does neither.

    A line that SIGKILL has cut off is removed; its episode counts as not played. Episodes that failed are not returned, so that
    they are tried again. One journal at a time can use a file.

    Args:
        path: the path of the file, which is made if it is missing.
        identity: values that differ between evaluations whose episodes must not be mixed.

    Raises:
        UsageError: the file belongs to another evaluation, is not such a file, or is used by another journal.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, object]) -> None:
        self.known: dict[tuple[str | None, int], Episode] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._file = file = self._open(Path(path))
            self._read(file, json.loads(dump_json(identity)))
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            self.close()
            why = "another process writes it" if isinstance(exc, BlockingIOError) else exc
            raise UsageError(f"resume={str(path)!r} is not for this evaluation: {why}; name another file") from exc

    def _open(self, path: Path) -> IO[bytes]:
        """Open and lock a file. The lock belongs to this process and not to its forked workers; closing any descriptor ends it."""
        with _opening:
            if path.exists() and _key_of(os.stat(path)) in _open_files:
                raise ValueError("another evaluation of this process writes it")
            file = path.open("ab+")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise
            self._key = _key_of(os.fstat(file.fileno()))
            _open_files.add(self._key)
            return file

    def _read(self, file: IO[bytes], identity: dict[str, object]) -> None:
        file.seek(0)
        text = file.read()
        header = f"{dump_json(identity)}\n".encode()
        if not text or (text.startswith(_MARK) and header.startswith(text)):  # new, or the first line was cut off
            file.truncate(0)
            file.write(header)
            file.flush()
            return
        end = text.rfind(b"\n") + 1
        found, *rows = map(json.loads, text[:end].splitlines() or [text])
        for name, wanted in identity.items():
            if found.get(name) != wanted:
                raise ValueError(f"its {name} is {found.get(name)!r} instead of {wanted!r}")
        episodes = [_checked(Episode(**row)) for row in rows]
        self.known = {(episode.task, episode.seed): episode for episode in episodes if episode.fault is None}
        file.truncate(end)

    def add(self, episode: Episode) -> None:
        """Append an episode, and store it as a later read returns it.

        The line survives the end of this program, but not a crash of the machine.
        """
        if self._file is not None:
            line = dump_json(asdict(episode))
            self._file.write(f"{line}\n".encode())
            self._file.flush()
            episode = Episode(**json.loads(line))
        self.known[episode.task, episode.seed] = episode

    def close(self) -> None:
        """Close the file, so that other processes can use it."""
        if self._file is not None:
            with _opening:
                self._file.close()
                _open_files.discard(self._key)


def _key_of(stat: os.stat_result) -> tuple[int, int, int]:
    """Return what identifies an open file of this process, also after a fork."""
    return os.getpid(), stat.st_dev, stat.st_ino


def _checked(episode: Episode) -> Episode:
    for name, hint in _HINTS.items():
        kinds = {get_origin(hint) or hint, *get_args(hint)} if name != "infos" else {dict}
        kind = type(value := getattr(episode, name))
        if kind not in kinds and not (kind is int and float in kinds):
            raise ValueError(f"the {name} of an episode is {value!r}")
    return episode
