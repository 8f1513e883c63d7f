"""In what form a pool hands out observations: for front-ends whose users want classes and tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import Node, program, walk


class PoolForms:
    """The part of `Pool` that says what observations look like, and steps for who wants nothing else."""

    _ledger: _native.Ledger
    _unclaimed: list[bool]
    spec: EnvSpec

    if TYPE_CHECKING:

        def step_wait(self, timeout_s: float | None = None) -> tuple[Any, ...]: ...

        def _take_back(self, result: object) -> None: ...

    def hand_out(
        self,
        observation: Node,
        *,
        wrap: Callable[[NDArray[Any]], object] | None = None,
        given: Mapping[int, NDArray[Any]] | None = None,
    ) -> None:
        """Say in which form batches of observations are handed out from now on: it costs no pass over what is made.

        Args:
            observation: the tree of `spec.observation`, its tuples with factories of your own.
            wrap: called with each array [B, ...]; what it returns takes the array's place. If it raises, the results can be
                received again.
            given: by number of a leaf, an array [num_rows, ...] of that leaf's dtype: what the rows hold there, whatever
                the envs say.
        Raises:
            UsageError: the tree has other leaves than `spec.observation`, or an array does not fit its leaf.
        """
        if list(walk(observation)) != list(walk(self.spec.observation)):
            raise UsageError(
                f"{observation} has other leaves than this pool's observations, {self.spec.observation}; give the same "
                "tree, with other factories"
            )
        arrays = {index: np.ascontiguousarray(array) for index, array in (given or {}).items()}
        self._ledger.hand_out(program(observation), wrap, arrays)

    def step_obs(self, actions: Any) -> Any:
        """Step all envs and return the newest observations, by the shortest way: no rewards, flags and infos. Hot path."""
        obs = None
        try:
            obs = self._ledger.step_obs(actions)
            self._unclaimed[0] = False
            return obs if obs is not None else self.step_wait()[0]
        except BaseException:
            self._take_back(obs)
            raise
