"""CPU time of the whole machine, from /proc/stat, and of the processes in a driver's tree."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Reading:
    """CPU seconds used so far by the machine (including time stolen by the hypervisor) and by the tree, and the wall clock."""

    machine_s: float
    tree_s: float
    wall_s: float


def tree_of(root: int) -> list[int]:
    """Return `root` and the running processes below it."""
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
    """Read the clocks. The tree is that of `root` and the calling process."""
    own = os.times()
    tree_s = own.user + own.system
    for pid in tree_of(root):
        fields = _stat_fields(pid)
        if fields is not None:
            # utime, stime, and the same of children that have ended
            tree_s += sum(int(field) for field in fields[11:15]) * TICK_S
    return Reading(_machine_s(), tree_s, time.monotonic())


def foreign_share(before: Reading, after: Reading) -> float:
    """Return the share of the machine that other processes used between two readings, 0 to 1."""
    capacity_s = (after.wall_s - before.wall_s) * NUM_CORES
    foreign_s = (after.machine_s - before.machine_s) - (after.tree_s - before.tree_s)
    return max(0.0, foreign_s / capacity_s)


def pss_mb(root: int) -> tuple[float, float]:
    """Return the proportional set size of a tree in megabytes, and the part in anonymous shared files (stepmill's slab)."""
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
    """Return the number of descriptors that a tree has open."""
    return sum(_open_files_of(pid) for pid in tree_of(root))


def _open_files_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _stat_fields(pid: int) -> list[str] | None:
    # The fields after the command name, which may contain spaces: state is [0], ppid [1], utime [11].
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
