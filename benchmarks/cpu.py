"""Whose CPU time it was: the whole machine's by /proc/stat, ours by the processes of a driver's tree."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Reading:
    """Seconds of CPU used so far: by everything (time stolen by the hypervisor included), by our tree, and the wall clock."""

    machine_s: float
    tree_s: float
    wall_s: float


def tree_of(root: int) -> list[int]:
    """The live processes below `root`, itself first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def read(root: int) -> Reading:
    """Read both clocks; `root`'s tree and the calling process count as ours."""
    own = os.times()
    tree_s = own.user + own.system
    for pid in tree_of(root):
        fields = _stat_fields(pid)
        if fields is not None:
            # utime, stime, and those of children that were waited for
            tree_s += sum(int(field) for field in fields[11:15]) * TICK_S
    return Reading(_machine_s(), tree_s, time.monotonic())


def foreign_share(before: Reading, after: Reading) -> float:
    """The part of the machine that others used between two readings, 0 to 1."""
    capacity_s = (after.wall_s - before.wall_s) * NUM_CORES
    foreign_s = (after.machine_s - before.machine_s) - (after.tree_s - before.tree_s)
    return max(0.0, foreign_s / capacity_s)


def pss_mb(root: int) -> tuple[float, float]:
    """Proportional set size of a tree in megabytes: all of it, and the part in anonymous shared files (stepmill's slab)."""
    total = shared = 0
    for pid in tree_of(root):
        try:
            text = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:
            continue
        in_memfd = False
        for line in text.splitlines():
            head = line.split(" ", 1)[0]
            if not head.endswith(":"):
                in_memfd = "/memfd:" in line
            elif head == "Pss:":
                size = int(line.split()[1])
                total += size
                shared += size if in_memfd else 0
    return total / 1024, shared / 1024


def open_files(root: int) -> int:
    """How many descriptors a tree has open."""
    return sum(_open_files_of(pid) for pid in tree_of(root))


def _open_files_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _stat_fields(pid: int) -> list[str] | None:
    # Fields after the command name, which may hold spaces: state is [0], ppid [1], utime [11].
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _machine_s() -> float:
    with open("/proc/stat") as lines:
        fields = [int(field) for field in lines.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) * TICK_S
