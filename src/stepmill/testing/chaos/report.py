"""What a run of chaos has inflicted, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_COMPLAINTS = 20


@dataclass
class ChaosReport:
    """What was inflicted and what came of it. `wrong` has the first complaints, in words; empty if all was well.

    Attributes:
        transitions: delivered, and each of them checked.
        broken: episodes that were cut short, or steps that raised; `kinds` says why.
        calls, calls_failed: of all kinds; those that failed were told so.
        rounds: how many there were of each kind.
        replays: transitions that were checked where none may be broken.
        held_mib: memory of this process each time that all kinds have had their turn.
    """

    seed: int
    seconds: float = 0.0
    transitions: int = 0
    replays: int = 0
    episodes: int = 0
    broken: int = 0
    calls: int = 0
    calls_failed: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    inflicted: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    revivals: int = 0
    capsules: int = 0
    held_mib: list[int] = field(default_factory=list)
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    now: str = ""

    def complain(self, text: str) -> None:
        """Count something wrong, and keep the words of the first."""
        self.num_wrong += 1
        if len(self.wrong) < MAX_COMPLAINTS:
            self.wrong.append(f"{self.now}: {text}")

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, rounds: {dict(self.rounds)}",
            f"inflicted: {dict(self.inflicted)}",
            f"workers restarted: {self.restarts}; revivals asked for: {self.revivals}; episodes ended: {self.episodes}; broken: {self.broken} {dict(self.kinds)}",
            f"calls: {self.calls}, of which told that they failed: {self.calls_failed}; capsules read: {self.capsules}",
            f"MiB held after each pass: {self.held_mib}",
            f"transitions checked: {self.transitions}, under replay: {self.replays}; wrong: {self.num_wrong}",
            *self.wrong,
        ]
        return "\n".join(lines)
