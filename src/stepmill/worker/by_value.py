"""Sends classes of packages whose import takes seconds to workers by value, so that workers need not import the packages.

`make_vec_env` of Stable-Baselines3 wraps each env in its `Monitor`, which is small. The import of its module also imports
PyTorch and pandas, which take each worker two seconds and 150 MB.

    learner   dump_by_value(env_fns) ──► Build ──► worker   adopt_on_import(), load

Each class exists once in a worker. If code there has imported such a module, its classes are taken, and not those that were sent. If it
imports the module later, the module gets the classes that were sent.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle

from stepmill._pickling import Pickler, dumps
from stepmill.worker.messages import dump_plain, is_plain

# What `make_vec_env`, `make_atari_env` and `SB3VecEnv` use in workers. This code needs nothing else of its package.
_MODULES = (
    "stable_baselines3.common.atari_wrappers",
    "stable_baselines3.common.env_util",
    "stable_baselines3.common.monitor",
    "stable_baselines3.common.vec_env.patch_gym",
    "stepmill.frontends.sb3",
)
_LOCK = threading.RLock()  # cloudpickle's list of modules is global


def dump_by_value(value: object) -> bytes:
    """Return a value as bytes that a worker can load without an import of the modules above."""
    if is_plain(value, not_named=_MODULES):
        return dump_plain(value)
    with _LOCK, ExitStack() as at_end:
        listed = cloudpickle.list_registry_pickle_by_value()
        own = [sys.modules[name] for name in _MODULES if name in sys.modules and name not in listed]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
            at_end.callback(cloudpickle.unregister_pickle_by_value, module)
        with suppress(Exception):  # a changed module may hold what cannot be pickled: then by name
            if own:
                file = io.BytesIO()
                _Pickler(file, {module.__name__ for module in own}).dump(value)
                return file.getvalue()
    return dumps(value)


class _Pickler(Pickler):
    """Sends each class of some modules together with its name."""

    def __init__(self, file: io.BytesIO, modules: Collection[str]) -> None:
        super().__init__(file)
        self._modules = modules

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ in self._modules:
            return take_class, (obj.__module__, obj.__qualname__, dumps(obj))
        return super().reducer_override(obj)


def take_class(module: str, name: str, sent: bytes) -> object:
    """In a worker: return the class of a module that is imported, or else the one that was sent."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else cloudpickle.loads(sent)


def adopt_on_import() -> None:
    """In a worker: let modules that are imported later have the classes that were loaded by value. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_adopt(module: ModuleType) -> None:
                run(module)
                vars(module).update(_loaded_classes(module))

            spec.loader.exec_module = run_and_adopt  # type: ignore[method-assign]
        return spec


def _loaded_classes(module: ModuleType) -> Iterator[tuple[str, type]]:
    """Yield the classes that were loaded by value, under the names that they have in their module."""
    own: dict[str, type] = {name: each for name, each in vars(module).items() if isinstance(each, type)}
    for name, each in own.items():
        identity = module.__name__, each.__qualname__
        siblings: list[type] = []
        for base in each.__bases__:
            siblings += type.__subclasses__(base)
        yield from ((name, twin) for twin in siblings if _identity(twin) == identity and twin is not each)


def _identity(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
