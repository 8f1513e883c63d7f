"""The file of an evaluation that can go on after it was killed: a line about the plan, and one per finished episode."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepmill import UsageError
from stepmill.evaluation.plan import Plan
from stepmill.evaluation.result import Episode, dump_json

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = 1


class Journal:
    """Reads the episodes that are in the file, and appends others. With `path` None it does neither.

    A line that SIGKILL has cut off is removed; its episode counts as not played. Episodes that failed are not returned, so that
    they are tried again. Use it as a context manager.

    Raises:
        UsageError: the file is of another env or of other tasks, or is no such file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, plan: Plan, success: object) -> None:
        self.known: dict[tuple[str | None, int], Episode] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        header = json.loads(
            dump_json(
                {
                    "stepmill_evaluation": _VERSION,
                    "env": plan.env,
                    "success": success
                    if success is None or isinstance(success, str)
                    else getattr(success, "__name__", "function"),
                    "tasks": {f"{task.name}": task.options for task in plan.tasks},
                }
            )
        )
        place = Path(path)
        lines = _whole_lines(place)
        if lines:
            self._read(place, lines, header)
        text = "".join(f"{line}\n" for line in lines) or f"{dump_json(header)}\n"
        scratch = place.with_name(f"{place.name}.new")
        scratch.write_text(text, encoding="utf-8")  # a whole file replaces the one with the cut line
        scratch.replace(place)
        self._file = place.open("a", encoding="utf-8")

    def _read(self, path: Path, lines: list[str], header: Mapping[str, Any]) -> None:
        try:
            first, *rows = map(json.loads, lines)
            episodes = [Episode(**row) for row in rows]
            found = {key: first[key] for key in header}
        except (ValueError, TypeError, KeyError) as exc:
            raise UsageError(
                f"resume={str(path)!r} is not the file of an evaluation ({exc}); name another file"
            ) from exc
        for key, value in found.items():
            if value != header[key]:
                raise UsageError(
                    f"resume={str(path)!r} has {key}={value!r}, and this evaluation has {header[key]!r}; name another file"
                )
        self.known = {(episode.task, episode.seed): episode for episode in episodes if episode.fault is None}

    def add(self, episode: Episode) -> None:
        """Append an episode, and know it. It survives the end of this program, but not a failure of the machine."""
        self.known[episode.task, episode.seed] = episode
        if self._file is not None:
            self._file.write(f"{dump_json(asdict(episode))}\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"resume={str(path)!r} cannot be read: {exc}; name another file") from exc
    return text[: text.rfind("\n") + 1].splitlines()
