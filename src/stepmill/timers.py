"""Hierarchical timers and gauges, for envs and for the learner: where the time goes, by the names you give.

    from stepmill import timers

    with timers.timed("physics"):        # a block
        ...

    @timers.timed("render")              # or a function
    def render(self): ...

    timers.gauge("objects", len(world))  # a number that one wants to see

Timers nest: one that is entered while another runs becomes its child. Each thread has a tree of its own. They are off,
and cost no more than a look at a flag, until `enable` turns them on for a thread: in a pool's workers that is done by the
option `timers_every`. `every=100` measures one in a hundred of the outermost timers, with all that is inside, and counts
it a hundred times.

`Pool.timers()` gives the trees of all workers, merged, beside the learner's own. This module imports nothing of stepmill,
so that envs may use it at no cost.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import TracebackType
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

    def note(self, value: float) -> None:
        self.value = value
        self.min = min(self.min, value)
        self.max = max(self.max, value)
        self.count += 1


class _Thread(threading.local):
    """The tree of one thread. `path` is the timers that run, outermost first; its first is the root."""

    def __init__(self) -> None:
        self.every = 0
        self.clear()

    def clear(self) -> None:
        self.path = [_Node()]
        self.root = self.path[0]
        self.gauges: dict[str, _Gauge] = {}
        self.num_outermost = 0
        self.num_skipped = 0  # timers that run inside one that is not measured, itself included
        self.began = _clock()


_own = _Thread()
_num_enabled = 0  # threads whose timers are on; 0 makes everything here a look at this number
_lock = threading.Lock()


class timed:  # noqa: N801 - reads like a function, and is used as one
    """Time a block (`with timed("name"):`) or a function (`@timed("name")`)."""

    __slots__ = ("_began", "_name", "_state")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a timer needs a name: write timed('name'), not timed({name!r})")
        self._name = name
        self._state = 0  # 0 off, 1 measuring, 2 passed over
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == 0:
            return
        own = _own
        if self._state == 2:
            own.num_skipped = max(own.num_skipped - 1, 0)
        elif len(own.path) > 1:  # it was not cleared meanwhile
            node = own.path.pop()
            node.total += _clock() - self._began
            node.count += 1

    def __call__(self, function: _Function) -> _Function:
        name = self._name

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not _num_enabled:
                return function(*args, **kwargs)
            with timed(name):
                return function(*args, **kwargs)

        return measured  # type: ignore[return-value]


def _is_sampled(own: _Thread) -> bool:
    own.num_outermost += 1
    return (own.num_outermost - 1) % own.every == 0


def gauge(name: str, value: float) -> None:
    """Note the newest value of something; its smallest, its largest and how often it was noted are kept."""
    if not _num_enabled or not _own.every:
        return
    found = _own.gauges.get(name)
    if found is None:
        found = _own.gauges[name] = _Gauge(float(value))
    found.note(float(value))


def enable(every: int = 1) -> None:
    """Turn the timers of this thread on: one in `every` outermost timers is measured. 0 turns them off."""
    global _num_enabled
    if every < 0 or every != int(every):
        raise ValueError(f"every={every!r} must be a whole number: 1 measures all, 100 one in a hundred, 0 none")
    with _lock:
        _num_enabled += bool(every) - bool(_own.every)
    _own.every = every


def disable() -> None:
    """Turn the timers of this thread off; what was measured stays."""
    enable(0)


def clear() -> None:
    """Forget what this thread has measured. Timers that run are not counted."""
    _own.clear()


def snapshot() -> Tree:
    """Return this thread's tree as it is now: what ended is counted, what still runs is not.

    Totals are seconds. With sampling, totals and counts are multiplied: they estimate what measuring all would have given.
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
    """Return one node of a tree; `self` is what of its total its children do not have."""
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
    """Return trees as one: totals and counts are added, node by node. `is_parallel`: they ran beside each other."""
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
    """Return gauges as one: the mean of the newest values, the smallest, the largest, and all counts added."""
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
