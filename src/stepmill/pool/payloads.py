"""What a result carries beside arrays becomes the batch's info: decoded and merged when it is first looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.infos import InfoRows, LazyInfo, merge
from stepmill.worker.messages import load

# (first row, payload, fault): the payload as bytes, decoded already where observations have parts of no fixed size, or
# None; the fault is what the info of an episode that was cut short says, else None.
Payload = tuple[int, Any, "dict[str, str] | None"]
Episodes = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]  # returns, lengths, which of them ended
MakeInfo = Callable[..., dict[str, Any]]


def info_maker(rows_each: int | None) -> MakeInfo:
    """Return the function that native code calls for a batch that carries more than arrays.

    It holds no pool, so that no cycle keeps a pool alive.
    """
    return functools.partial(_make_info, rows_each)


def _make_info(
    rows_each: int | None,
    payloads: Sequence[Payload],
    finals: Sequence[tuple[int, object]],
    episodes: Episodes | None,
    num_rows: int,
    env_ids: NDArray[np.int64] | None,
    fixed: dict[str, Any],
) -> dict[str, Any]:
    def load_info() -> dict[str, Any]:
        merged = merge(_in_row_order(payloads, dict(finals)), num_rows, rows_each=rows_each, env_ids=env_ids)
        if episodes is not None and "episode" not in merged:
            merged.update(_episode_info(*episodes))
        return {**fixed, **merged}

    def load_rows() -> InfoRows:
        return _one_by_one(payloads, dict(finals))

    return LazyInfo(load_info, load_rows)


def _one_by_one(payloads: Sequence[Payload], finals: dict[int, object]) -> InfoRows:
    rows: InfoRows = []
    for payload in payloads:
        try:
            rows.extend(_in_row_order([payload], finals))
        except Exception as exc:  # loading runs code of the user's classes; the other rows have nothing to do with it
            rows.append((payload[0], exc))
    return rows


def _in_row_order(payloads: Sequence[Payload], finals: dict[int, object]) -> Iterator[tuple[int, dict[Any, Any]]]:
    for row, payload, fault in payloads:
        decoded: Any = _native.decode(payload, load) if isinstance(payload, bytes) else payload
        info, final_info, _, _ = decoded or ({}, None, None, None)
        if fault is not None:
            if row not in finals:
                info = {**info, "fault": fault}
            final_info = {"fault": fault}
        if row in finals:
            yield row, {"final_obs": finals[row], "final_info": final_info}
        yield row, info


def _episode_info(returns: NDArray[np.float64], lengths: NDArray[np.int64], ended: NDArray[np.bool_]) -> dict[str, Any]:
    """Return and length of the episodes that ended, under the names of Gymnasium's RecordEpisodeStatistics.

    A return has the shape of the env's reward: with agents it is one per agent.
    """
    in_shape = ended.reshape(ended.shape + (1,) * (returns.ndim - 1))
    return {
        "episode": {
            "r": np.where(in_shape, returns, 0.0),
            "l": np.where(ended, lengths, 0),
            "_r": ended,
            "_l": ended.copy(),
        },
        "_episode": ended.copy(),
    }
