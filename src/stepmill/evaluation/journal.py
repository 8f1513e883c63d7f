"""The file of an evaluation that can go on after it was killed: a line about the plan, and one per finished episode."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

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
        judge = success if isinstance(success, str | None) else getattr(success, "__name__", "function")
        tasks = {f"{task.name}": task.options for task in plan.tasks}
        header = dump_json({"stepmill_evaluation": _VERSION, "env": plan.env, "success": judge, "tasks": tasks})
        place = Path(path)
        first, *rows = _whole_lines(place) or [header]
        if first != header:
            raise UsageError(
                f"resume={str(path)!r} is the file of {first[:400]}, and not of {header}; name another file"
            )
        try:
            episodes = [Episode(**json.loads(row)) for row in rows]
        except (ValueError, TypeError) as exc:
            raise UsageError(f"resume={str(path)!r} has a damaged line ({exc}); name another file") from exc
        self.known = {(episode.task, episode.seed): episode for episode in episodes if episode.fault is None}
        scratch = place.with_name(f"{place.name}.new")
        scratch.write_text("".join(f"{line}\n" for line in (first, *rows)), encoding="utf-8")
        scratch.replace(place)  # a whole file replaces the one with the line that was cut off
        self._file = place.open("a", encoding="utf-8")

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
