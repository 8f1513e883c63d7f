"""A pytest plugin: `gymnasium.make_vec` makes stepmill's vector envs, through the vector entry point of each id."""

from __future__ import annotations

from typing import Any

import gymnasium

from stepmill import install_vector_entry_points

_make_vec = gymnasium.make_vec


def _make_ours(env_id: str, num_envs: int = 1, vectorization_mode: Any = None, **kwargs: Any) -> Any:
    if vectorization_mode in (
        "vector_entry_point",
        gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
    ):  # the library tries envs that are vector envs themselves
        return _make_vec(env_id, num_envs, vectorization_mode, **kwargs)
    with install_vector_entry_points([env_id], replace_others=True, backend="process"):
        return _make_vec(env_id, num_envs, "vector_entry_point", **kwargs)


def replace() -> None:
    """Replace the function in this process."""
    gymnasium.make_vec = _make_ours


replace()
