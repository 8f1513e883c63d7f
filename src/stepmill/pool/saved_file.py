"""The file of saved envs: a container of `stepmill.spec.container`, whose payload is a value in the native codec.

What the codec cannot hold is pickled. A file with pickled parts is read only with `trust=True`, because loading them can run any code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.pool.positions import SavedEnvs
from stepmill.spec import container
from stepmill.spec.container import refuse_pickle
from stepmill.spec.errors import UsageError
from stepmill.worker.messages import dump, load

_KIND = "file of saved envs"
_OBJECTS = "stepmill: array of objects"


def write_saved(path: str, saved: SavedEnvs) -> None:
    """Write a file, as a whole or not at all.

    Raises:
        OSError: the file cannot be written. A file that was there before is not changed.
    """
    pickled: list[str] = []

    def pickle(value: object) -> bytes:
        pickled.append(type(value).__name__)
        return dump(value)

    def name(data: bytes) -> object:
        value = load(data)
        pickled.append(type(value).__name__)
        return value

    _decode_parts(saved, name)
    values = {each.name: getattr(saved, each.name) for each in fields(saved) if each.name != "obs"}
    payload = _native.encode(_without_objects(values), pickle)
    container.write(path, _KIND, {"pickled": sorted(set(pickled))}, payload)


def read_saved(path: str, *, trust: bool) -> SavedEnvs:
    """Read a file. Pickled parts are loaded only with `trust`.

    Raises:
        UsageError: there is no such file, it is damaged, it has another version, or it needs `trust`.
    """
    header, payload = container.read(path, _KIND)
    if header.get("pickled") and not trust:
        raise UsageError(
            f"{path} has pickled values of the types {header['pickled']}, and loading them can run any code that is in the file; if "
            "you wrote the file, give trust=True"
        )
    try:
        values: Any = _native.decode(payload, load if trust else refuse_pickle)
        saved = SavedEnvs(**_with_objects(values))
        if not trust:
            _decode_parts(saved, refuse_pickle)
        return saved
    except UsageError:
        raise
    except Exception as exc:
        raise UsageError(f"{path} is not a {_KIND}, or cannot be loaded here: {exc!r}; give another file") from exc


def _decode_parts(saved: SavedEnvs, unpickle: Callable[[bytes], object]) -> None:
    """Decode the parts that stay encoded until the pool or a worker reads them: reset options, opaque actions and unclaimed infos."""
    for each in saved.envs:
        position = each["position"]
        ends = np.frombuffer(position["blob_ends"], np.uint64).tolist()
        parts = [position["blobs"][begin:end] for begin, end in pairwise([0, *ends])]
        for part in [*parts, *(position[name] for name in ("newest_blob", "reset_blob", "begin_blob"))]:
            if part:
                _native.decode(part, unpickle)
        infos = None if position["unclaimed"] is None else position["unclaimed"][0]
        if infos is not None and isinstance(infos[0], bytes):
            _native.decode_all(infos[0], unpickle, infos[2])


def _without_objects(value: Any) -> Any:
    """Replace arrays of objects, which infos have, by lists that the codec holds without pickle."""
    if isinstance(value, dict):
        return {key: _without_objects(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_objects, value)) if type(value) in (list, tuple) else value
    if isinstance(value, np.ndarray) and value.dtype.hasobject and value.ndim == 1:
        return {_OBJECTS: [_without_objects(part) for part in value]}
    return value


def _with_objects(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_OBJECTS}:
        array = np.empty(len(value[_OBJECTS]), object)
        array[:] = [_with_objects(part) for part in value[_OBJECTS]]
        return array
    if isinstance(value, dict):
        return {key: _with_objects(part) for key, part in value.items()}
    return type(value)(map(_with_objects, value)) if type(value) in (list, tuple) else value
