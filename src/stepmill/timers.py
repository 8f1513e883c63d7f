"""Hierarchical timers and gauges, for envs and for the learner.

    from stepmill import timers

    with timers.timed("physics"):        # a block
        ...

    @timers.timed("render")              # or a function
    def render(self): ...

    timers.gauge("objects", len(world))  # a number to record

Timers nest: a timer that is entered while another runs becomes its child. Each thread has its own tree. Timers are off until
`enable` turns them on for a thread; while they are off, they cost only the test of a flag. The option `tuning.timers_every` turns
them on in a pool's workers. `every=100` measures one in a hundred of the outermost timers, with all timers inside, and counts it
a hundred times.

`stepmill.read_timers(pool)` returns the merged tree of all workers and the learner's own. This module imports nothing from stepmill, so
that it is cheap for envs to import.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Tree: TypeAlias = dict[str, Any]
"""name, total [s], count, self [s], children {name: tree}, is_parallel; at the root also gauges and metadata."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_clock = time.perf_counter


class _Node:
    __slots__ = ("children", "count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.children: dict[str, _Node] = {}


class _Gauge:
    __slots__ = ("count", "max", "min", "value")

    def __init__(self, value: float) -> None:
        self.value = self.min = self.max = value
        self.count = 0

    def record(self, value: float) -> None:
        self.value = value
        self.min = min(self.min, value)
        self.max = max(self.max, value)
        self.count += 1


class _Thread(threading.local):
    """The tree of one thread. `path` holds the root and then the running timers, outermost first."""

    def __init__(self) -> None:
        self.every = 0
        self.clear()

    def clear(self) -> None:
        self.path = [_Node()]
        self.root = self.path[0]
        self.gauges: dict[str, _Gauge] = {}
        self.num_outermost = 0
        self.num_skipped = 0  # running timers that are not measured: an outermost one and those inside it
        self.began = _clock()


_own = _Thread()
_num_enabled = 0  # threads whose timers are on; while it is 0, a timer only tests this number
_lock = threading.Lock()


class timed:  # noqa: N801 - it is used like a function
    """Time a block (`with timed("name"):`) or a function (`@timed("name")`).

    Args:
        name: the name of the timer.
        count: the number of calls that one run of the block counts as.
    """

    __slots__ = ("_began", "_count", "_name", "_state")

    def __init__(self, name: str, count: int = 1) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a timer needs a name: write timed('name'), not timed({name!r})")
        self._name = name
        self._count = count
        self._state = 0  # 0 off, 1 measuring, 2 skipped
        self._began = 0.0

    def __enter__(self) -> None:
        self._state = 0
        if not _num_enabled or not _own.every:
            return
        own = _own
        if own.num_skipped or (len(own.path) == 1 and not _is_sampled(own)):
            own.num_skipped += 1
            self._state = 2
            return
        children = own.path[-1].children
        node = children.get(self._name)
        if node is None:
            node = children[self._name] = _Node()
        own.path.append(node)
        self._state = 1
        self._began = _clock()

    def __exit__(self, *_: object) -> None:
        if self._state == 0:
            return
        own = _own
        if self._state == 2:
            own.num_skipped = max(own.num_skipped - 1, 0)
        elif len(own.path) > 1:  # otherwise clear() was called while the timer ran
            node = own.path.pop()
            node.total += _clock() - self._began
            node.count += self._count

    def __call__(self, function: _Function) -> _Function:
        name, count = self._name, self._count

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not _num_enabled:
                return function(*args, **kwargs)
            with timed(name, count):
                return function(*args, **kwargs)

        return measured  # type: ignore[return-value]


def _is_sampled(own: _Thread) -> bool:
    own.num_outermost += 1
    return (own.num_outermost - 1) % own.every == 0


def gauge(name: str, value: float) -> None:
    """Record the newest value of a quantity. The smallest, the largest and the number of values are kept as well."""
    if not _num_enabled or not _own.every:
        return
    found = _own.gauges.get(name)
    if found is None:
        found = _own.gauges[name] = _Gauge(float(value))
    found.record(float(value))


def enable(every: int = 1) -> None:
    """Turn on the timers of this thread, and measure one in `every` of the outermost timers. 0 turns the timers off."""
    global _num_enabled
    if every < 0 or every != int(every):
        raise ValueError(f"every={every!r} must be a whole number: 1 measures all, 100 one in a hundred, 0 none")
    with _lock:
        _num_enabled += bool(every) - bool(_own.every)
    _own.every = every


def disable() -> None:
    """Turn off the timers of this thread, and keep their measurements."""
    enable(0)


def clear() -> None:
    """Delete the measurements of this thread. Timers that are running are not counted."""
    _own.clear()


def snapshot() -> Tree:
    """Return this thread's current tree. Timers that are still running are not counted.

    Totals are in seconds. With sampling, totals and counts are multiplied by `every` to estimate the true values.
    """
    own = _own
    times = max(own.every, 1)
    tree = _plain("root", own.root, times)
    tree["total"], tree["count"] = _clock() - own.began, 1
    tree["self"] = max(tree["total"] - sum(child["total"] for child in tree["children"].values()), 0.0)
    tree["gauges"] = {
        name: {"value": each.value, "min": each.min, "max": each.max, "count": each.count}
        for name, each in own.gauges.items()
    }
    tree["metadata"] = {"every": own.every}
    return tree


def _plain(name: str, node: _Node, times: int) -> Tree:
    return make_node(
        name,
        total=node.total * times,
        count=node.count * times,
        children={key: _plain(key, child, times) for key, child in node.children.items()},
    )


def make_node(
    name: str, *, total: float, count: int, children: dict[str, Tree] | None = None, is_parallel: bool = False
) -> Tree:
    """Return one node of a tree. `self` is its total without the totals of its children."""
    children = children or {}
    inside = sum(child["total"] for child in children.values())
    return {
        "name": name,
        "total": total,
        "count": count,
        "self": max(total - inside, 0.0),
        "children": children,
        "is_parallel": is_parallel,
    }


def merge(name: str, trees: list[Tree], *, is_parallel: bool = True) -> Tree:
    """Merge trees into one: totals and counts are added, node by node. `is_parallel` says that the trees ran at the same time."""
    children: dict[str, list[Tree]] = {}
    for tree in trees:
        for key, child in tree["children"].items():
            children.setdefault(key, []).append(child)
    return make_node(
        name,
        total=sum(tree["total"] for tree in trees),
        count=sum(tree["count"] for tree in trees),
        children={key: merge(key, group, is_parallel=is_parallel) for key, group in children.items()},
        is_parallel=is_parallel,
    )


def merge_gauges(groups: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Merge gauges: the mean of the newest values, the smallest, the largest, and the sum of the counts."""
    names = sorted({name for group in groups for name in group})
    merged = {}
    for name in names:
        each = [group[name] for group in groups if name in group]
        merged[name] = {
            "value": sum(one["value"] for one in each) / len(each),
            "min": min(one["min"] for one in each),
            "max": max(one["max"] for one in each),
            "count": sum(one["count"] for one in each),
        }
    return merged
