"""The report of a chaos run: counters of injected faults and checked results, and complaints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_COMPLAINTS = 20


@dataclass
class ChaosReport:
    """Counters of a run, and complaints.

    Attributes:
        transitions: number of transitions that were delivered and checked.
        broken: number of episodes that were cut short and steps that raised; `kinds` counts them by cause.
        calls, calls_failed: number of calls of envs, and of those that raised an error.
        rounds: number of rounds of each kind.
        inflicted: number of injected faults of each kind.
        replays: number of transitions that were checked under the policy "replay", which may break none.
        held_mib: memory of this process after each pass over all kinds.
        num_wrong, wrong: number of complaints, and the texts of the first ones.
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
        """Count a wrong result, and store the text if it is among the first MAX_COMPLAINTS."""
        self.num_wrong += 1
        if len(self.wrong) < MAX_COMPLAINTS:
            self.wrong.append(f"{self.now}: {text}")

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, rounds: {dict(self.rounds)}",
            f"inflicted: {dict(self.inflicted)}",
            f"workers restarted: {self.restarts}; revivals: {self.revivals}; episodes ended: {self.episodes}; broken: {self.broken} {dict(self.kinds)}",
            f"calls: {self.calls}, of which failed: {self.calls_failed}; capsules read: {self.capsules}",
            f"MiB held after each pass: {self.held_mib}",
            f"transitions checked: {self.transitions}, under replay: {self.replays}; wrong: {self.num_wrong}",
            *self.wrong,
        ]
        return "\n".join(lines)
