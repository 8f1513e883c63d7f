"""`install_vector_entry_points`: lets `gymnasium.make_vec` make stepmill's vector envs, for programs that call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from stepmill.frontends.gymnasium.arguments import VECTOR_NAMES, VectorKeywords
from stepmill.frontends.gymnasium.make import make_vec, registered_spec
from stepmill.frontends.gymnasium.vector import VectorEnv
from stepmill.spec.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


@dataclass(frozen=True)
class _EntryPoint:
    """The function that `gymnasium.make_vec` calls with its own keywords and those of the env's registration."""

    spec: GymnasiumSpec
    options: Mapping[str, Any] = field(repr=False)

    def __call__(self, **kwargs: Any) -> VectorEnv:
        return make_vec(self.spec, **{**self.options, **kwargs})


class VectorEntryPoints:
    """The entry points that `install_vector_entry_points` has set. As a context manager, it uninstalls them at its end."""

    def __init__(self, specs: Iterable[GymnasiumSpec], options: Mapping[str, Any]) -> None:
        self._installed: list[tuple[GymnasiumSpec, object, Any]] = []
        for spec in specs:
            # The keywords of the registration are left out, because Gymnasium adds them to each call.
            ours = _EntryPoint(replace(spec, kwargs={}, vector_entry_point=None), options)
            self._installed.append((spec, ours, spec.vector_entry_point))
            spec.vector_entry_point = ours

    def uninstall(self) -> None:
        """Restore the entry points that the envs had before, except those that were replaced meanwhile."""
        for spec, ours, previous in reversed(self._installed):
            if spec.vector_entry_point is ours:
                spec.vector_entry_point = previous

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install_vector_entry_points(
    ids: Iterable[str], *, replace_others: bool = False, **options: Unpack[VectorKeywords]
) -> VectorEntryPoints:
    """Let `gymnasium.make_vec(id, num_envs, vectorization_mode="vector_entry_point")` make a `VectorEnv` of stepmill.

    This is for libraries that call `gymnasium.make_vec`, such as RLlib and skrl. It sets the entry points of this
    process only. If a library makes its envs in other processes, call it in these processes.

    Args:
        ids: ids of registered envs. "module:id" imports the module first.
        replace_others: whether to replace the vector entry points that envs have already, as CartPole-v1 does.
        **options: keywords of `VectorEnv`, for all of them. Keywords of `gymnasium.make_vec` override them.

    Returns:
        An object whose `uninstall()` restores the entry points that were there before. It is also a context manager.

    Raises:
        UsageError: an env already has a vector entry point, or `VectorEnv` has no such keyword. Nothing is installed.
        gymnasium.error.Error: an id is not registered.
    """
    if unknown := sorted(options.keys() - set(VECTOR_NAMES)):
        raise UsageError(f"{', '.join(unknown)}: VectorEnv has no such keyword")
    specs = [registered_spec(id_) for id_ in ([ids] if isinstance(ids, str) else ids)]
    taken = [spec.id for spec in specs if spec.vector_entry_point is not None]
    if taken and not replace_others:
        raise UsageError(
            f"{', '.join(taken)} have a vector entry point already; give replace_others=True to use stepmill's in its place "
            "until it is uninstalled"
        )
    return VectorEntryPoints(specs, options)
