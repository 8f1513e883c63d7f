"""The file of an evaluation that can continue after it was killed: a line about the evaluation, and a line per finished episode."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from stepmill import UsageError
from stepmill.evaluation.result import Episode, dump_json


class Journal:
    """Reads the episodes that are in the file, and appends others. With `path` None it does neither.

    A line that SIGKILL has cut off is removed; its episode counts as not played. Episodes that failed are not returned, so that
    they are tried again. One process at a time can use a file.

    Args:
        path: the path of the file, which is made if it is missing.
        identity: values that differ between evaluations whose episodes must not be mixed.

    Raises:
        UsageError: the file belongs to another evaluation, is not such a file, or is used by another process.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, object]) -> None:
        self.known: dict[tuple[str | None, int], Episode] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._file = file = Path(path).open("ab+")  # noqa: SIM115 - close() closes it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process has this lock, and its forked workers do not
            self._read(file, json.loads(dump_json(identity)))
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            self.close()
            why = "another process writes it" if isinstance(exc, BlockingIOError) else exc
            raise UsageError(f"resume={str(path)!r} is not for this evaluation: {why}; name another file") from exc

    def _read(self, file: IO[bytes], identity: dict[str, object]) -> None:
        file.seek(0)
        text = file.read()
        header = f"{dump_json(identity)}\n".encode()
        if header.startswith(text):  # the file is new, or the first line was cut off
            file.truncate(0)
            file.write(header)
            file.flush()
            return
        end = text.rfind(b"\n") + 1
        found, *rows = map(json.loads, text[:end].splitlines() or [text])
        for name, wanted in identity.items():
            if found.get(name) != wanted:
                raise ValueError(f"its {name} is {found.get(name)!r} instead of {wanted!r}")
        episodes = [Episode(**row) for row in rows]
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
            self._file.close()
