"""The env objects of a pool, for front-ends whose originals have a list of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepmill.spec.options import BackendName

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool


def env_objects(owner: object, pool: Pool, instead: str) -> tuple[Any, ...]:
    """Return the env objects, for the property `envs` of `owner`. It is a tuple, because the pool would not notice an item's replacement.

    Args:
        owner: the vector env.
        pool: its pool.
        instead: the methods of `owner` that reach envs in workers.

    Raises:
        AttributeError: the envs are objects in workers.
    """
    if pool.options.backend is not BackendName.SERIAL:
        raise AttributeError(
            f"{type(owner).__name__!r} object has no attribute 'envs'; the envs are objects in workers: {instead}. With "
            "backend='serial' they are here",
            name="envs",
            obj=owner,
        )
    return tuple(pool.call(_itself))


def _itself(env: Any) -> Any:
    return env
