"""A `Pool` for JAX: batches as JAX arrays by DLPack, and `send`, `recv` and `step` functions that work inside `jit`.

    handle, recv, send, step = stepmill.jax.xla(pool)

The interface is EnvPool's. The functions are ordered callbacks: XLA calls each once, in the order of the program, with arrays
on the host. The handle is a token that orders the calls; it carries no data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from stepmill.pool.pool import Pool
from stepmill.spec.batch import Batch
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.tree import Node, leaves, opaques, unflatten

with needs_extra("jax", "jax", ImportError):
    import jax
    from jax.experimental import io_callback

Handle: TypeAlias = Any
States: TypeAlias = tuple[Any, Any, Any, Any, Any]  # obs, reward, terminated, truncated, env_id


def as_jax(batch: Batch) -> Batch:
    """Return the batch as JAX arrays. DLPack makes them, without a copy where JAX can use the memory directly.

    A lease lasts as long as such an array exists. Do not write into the batch: JAX assumes that arrays are immutable.
    """
    return replace(
        batch,
        obs=jax.tree.map(_import_array, batch.obs),
        reward=_import_array(batch.reward),
        terminated=_import_array(batch.terminated),
        truncated=_import_array(batch.truncated),
        env_id=_import_array(batch.env_id),
    )


def xla(pool: Pool) -> tuple[Handle, Callable[[Handle], Any], Callable[..., Handle], Callable[..., Any]]:
    """Return (handle, recv, send, step) for use inside and outside of `jit`, `lax.scan` and `lax.fori_loop`.

    B is the pool's batch_size, or N if it has none.

    - `recv(handle)` returns (handle, (obs [B, ...], reward [B], terminated [B], truncated [B], env_id [B])).
    - `send(handle, actions [B, ...], env_id [B] or None)` returns the handle; None means all envs.
    - `step(handle, actions, env_id=None)` does both.

    Dtypes are those of the env, with 32 bits unless JAX's x64 mode is enabled. Before the first call, reset the pool with
    `pool.reset()`, or with `pool.reset_async()` if `recv` is called first.

    Raises:
        UsageError: observations or actions have parts without a fixed size.
    """
    shapes = _result_shapes(pool)
    token = jax.ShapeDtypeStruct((), np.uint8)

    def receive(_: Any) -> tuple[Any, States]:
        batch = pool.recv(pool.batch_size or pool.num_envs)
        fields = (batch.obs, batch.reward, batch.terminated, batch.truncated, batch.env_id)
        cast = jax.tree.map(lambda array, like: np.asarray(array, like.dtype), fields, shapes)
        return np.uint8(0), cast

    def send_actions(_: Any, actions: Any, env_id: Any) -> Any:
        ids = np.asarray(env_id)
        pool.send(jax.tree.map(np.asarray, actions), ids if len(ids) else None)
        return np.uint8(0)

    def recv(handle: Handle) -> tuple[Handle, States]:
        result: tuple[Handle, States] = io_callback(receive, (token, shapes), handle, ordered=True)
        return result

    def send(handle: Handle, actions: Any, env_id: Any = None) -> Handle:
        ids = np.zeros(0, np.int32) if env_id is None else env_id
        return io_callback(send_actions, token, handle, actions, ids, ordered=True)

    def step(handle: Handle, actions: Any, env_id: Any = None) -> tuple[Handle, States]:
        return recv(send(handle, actions, env_id))

    return jax.numpy.uint8(0), recv, send, step


def _result_shapes(pool: Pool) -> States:
    """Return the shapes and dtypes of what `recv` returns."""
    for name, node in (("observations", pool.spec.observation), ("actions", pool.spec.action)):
        if opaques(node):
            raise UsageError(
                f"the {name} have parts without a fixed size ({opaques(node)}), which XLA does not support; use pool.step()"
            )
    size = (pool.batch_size or pool.num_envs) * pool.spec.batch_size
    return (
        _shapes(pool.spec.observation, size),
        _shape(np.float64, (size,)),
        _shape(np.bool_, (size,)),
        _shape(np.bool_, (size,)),
        _shape(np.int64, (size,)),
    )


def _import_array(array: Any) -> Any:
    return jax.dlpack.from_dlpack(array) if isinstance(array, np.ndarray) else array


def _shape(dtype: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def _shapes(node: Node, size: int) -> Any:
    return unflatten(node, [_shape(leaf.dtype, (size, *leaf.shape)) for _, leaf in leaves(node)])
