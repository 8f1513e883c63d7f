"""`RayRollout`: collects rollouts on the nodes of a Ray cluster, where the envs run.

    program ──policy, version──► actor of node 0: Pool, Rollout, policy ──Fragment──► program
                             └─► actor of node 1: Pool, Rollout, policy ──Fragment──►

Each node sends one message per T steps instead of one per step. It runs an ordinary Pool of its own envs, and the
policy. Ray is imported when the first RayRollout is made.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepmill.backends.ray import cluster
from stepmill.backends.ray.cluster import CHECK_S, PlaceSearch
from stepmill.frontends.rollout import Policy, Rollout, RolloutBatch
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, Seed, checked_fns, spread_seed
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import ClosedPoolError, RecvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import OPTION_NAMES, BackendName, OnFault, OptionKeywords, merge_options
from stepmill.spec.ray_options import RayOptions
from stepmill.worker.messages import dump, load

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

MAX_WAIT_S = 3600.0  # the longest wait of one call of Ray
MAX_IN_FLIGHT = 2  # fragments of a node that were ordered and have not been received


@dataclass(frozen=True, eq=False)
class Fragment:
    """T steps of the envs of one node.

    Attributes:
        node: the number of the node.
        env_ids: [n] int64, the envs of the columns of `batch`.
        version: the version of the policy that acted in all T steps.
        is_first: whether the node's envs were reset before these steps, at the start or after the node was replaced.
        batch: the steps. Its arrays are read-only and stay valid.
    """

    node: int
    env_ids: NDArray[np.int64]
    version: int
    is_first: bool
    batch: RolloutBatch


class RolloutHost:
    """The object that runs in the actor of a node."""

    def __init__(self, setup: bytes) -> None:
        self._setup: Any = load(setup)
        self._pool: Pool | None = None
        self._rollout: Rollout | None = None
        self._policy: Any = b""  # pickled until it is first used
        self._version = -1
        self._is_first = True

    def set_policy(self, version: int, policy: bytes) -> None:
        """Use a policy from the next fragment on, unless a newer policy has arrived."""
        if version > self._version:
            self._policy, self._version = policy, version

    def collect(self) -> tuple[int, bool, RolloutBatch] | StepmillError:
        """Return the version of the policy, whether the envs were reset first, and T steps. An exception of the policy is passed on."""
        env_fns, options, num_steps, is_double_buffered, seeds, path = self._setup
        is_first, self._is_first = self._is_first, True
        try:
            if self._rollout is None:  # not in the constructor, whose errors would look like the loss of the actor
                sys.path += [entry for entry in path if entry not in sys.path]
                made: Any = [load(env_fn) for env_fn in env_fns]
                self._pool = self._pool or Pool(made, options=options)
                self._rollout = Rollout(self._pool, num_steps, is_double_buffered=is_double_buffered)
            if isinstance(self._policy, bytes):
                self._policy = load(self._policy)
            if is_first:
                self._rollout.reset(seed=seeds)
                self._setup[4] = None
            batch = self._rollout.collect(self._policy)
        except StepmillError as error:
            return error
        self._is_first = False
        return self._version, is_first, batch


class RayRollout(CloseAtEnd):
    """Collects T steps at a time from envs on the nodes of a Ray cluster.

    `from_pool` makes a RayRollout from a Pool with backend="ray".

    Args:
        env_fns: functions without arguments, one per env. They are divided evenly among the nodes.
        num_steps: T, the number of steps in a fragment.
        policy: a function as for `Rollout.collect`. It takes observations [B, ...] and env ids [B] of a node, and
            returns actions, or actions and a dict of further arrays. It is pickled with cloudpickle and runs on the
            nodes. The ids count from 0 on each node.
        seed: the seed of the envs' first resets, as for `Pool.reset`.
        is_double_buffered: as for `Rollout`.
        nodes: where the nodes run; None means RayOptions().
        **keywords: fields of PoolOptions by name, for the pool of each node. `backend` is "auto" by default. With
            on_fault="raise", `recv` raises the errors of a node. With the other policies, a lost node is replaced, and
            its envs begin new episodes.
    Raises:
        UsageError: an env_fn or the policy cannot be pickled, or an option is wrong.
        EnvTimeout: the nodes did not start in time.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        num_steps: int,
        *,
        policy: Policy,
        seed: Seed = None,
        is_double_buffered: bool = False,
        nodes: RayOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        env_fns = checked_fns(env_fns)
        self.options = merge_options(None, keywords)
        if self.options.backend is BackendName.RAY:
            raise UsageError(
                "a RayRollout runs a local pool on each node; give backend='process', or leave it out. "
                "RayRollout.from_pool takes the envs and options of a pool with backend='ray'"
            )
        if self.options.resets.spare_envs:
            raise UsageError(
                f"resets.spare_envs={self.options.resets.spare_envs}: a RayRollout gives each of its envs a column; leave it out"
            )
        self.nodes = nodes or RayOptions()
        self.num_envs, self.version = len(env_fns), 0
        self._module = cluster.connect()
        num_nodes = cluster.count_nodes(self._module, self.nodes, len(env_fns))
        self._env_ids = np.array_split(np.arange(len(env_fns)), num_nodes)
        seeds = spread_seed(seed, range(len(env_fns)), len(env_fns), 1)
        self._setups = [
            (_dumped("env_fns", [env_fns[i] for i in ids]), num_steps, is_double_buffered, [seeds[i] for i in ids])
            for ids in self._env_ids
        ]
        self._policy = _dumped("policy", [policy])[0]
        self._restarts = [0] * num_nodes
        self._times: list[list[float]] = [[] for _ in range(num_nodes)]
        self._orders: dict[Any, int] = {}  # the node of each fragment that was ordered, by Ray's reference
        self._collected: dict[int, Fragment] = {}  # by node, the fragments of a `collect` that raised
        self._searches: dict[int, PlaceSearch] = {}  # by node, for a new actor that has not returned steps yet
        self._actors: list[Any] = [None] * num_nodes
        self._is_closed = False
        for node in range(num_nodes):
            self._start(node)

    @classmethod
    def from_pool(
        cls, pool: Pool, num_steps: int, *, policy: Policy, seed: Seed = None, is_double_buffered: bool = False
    ) -> Self:
        """Return a rollout of the envs of a pool with backend="ray", with its options, and close the pool.

        The envs are rebuilt next to the policy, on nodes that reserve as many CPUs as those of the pool. Attributes and
        properties that were set on the envs are not passed on; set them in the env_fns.

        Args:
            pool: the pool. It is closed when this returns, and unchanged if this raises.
            num_steps, policy, seed, is_double_buffered: as for the constructor.
        Raises:
            UsageError: the pool has another backend, or the constructor raises it.
            ClosedPoolError: the pool is closed.
        """
        options = pool.options
        if options.backend is not BackendName.RAY:
            raise UsageError(
                "the envs of this pool run on this machine; use stepmill.Rollout(pool, ...), or give the pool backend='ray'"
            )
        num_nodes = len(pool.stats().nodes)
        nodes = options.ray
        num_workers = options.num_workers if nodes.host == "kernel" else pool.num_workers
        keywords: dict[str, Any] = {
            name: getattr(options, name)
            for name in OPTION_NAMES
            if name not in ("backend", "num_workers", "envs_per_worker", "ray")
        }
        rollout = cls(
            PoolPort(pool).env_fns,
            num_steps,
            policy=policy,
            seed=seed,
            is_double_buffered=is_double_buffered,
            nodes=dataclasses.replace(nodes, num_nodes=num_nodes),
            backend=BackendName(nodes.host),
            num_workers=None if num_workers is None else -(-num_workers // num_nodes),
            **keywords,
        )
        pool.close()  # frees its CPUs, for which the actors of the rollout may be waiting
        return rollout

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self._env_ids)

    @property
    def num_restarts(self) -> int:
        """How often a node was replaced."""
        return sum(self._restarts)

    def _start(self, node: int, *, is_replacement: bool = False, machine: str | None = None) -> None:
        """Start the actor of a node. It runs on `machine` without a reservation; None lets Ray choose."""
        self._orders = {ref: owner for ref, owner in self._orders.items() if owner != node}
        self._searches.pop(node, None)
        cluster.kill(self._module, self._actors[node])
        env_fns, num_steps, is_double_buffered, seeds = self._setups[node]
        own_seeds = None if is_replacement or all(seed is None for seed in seeds) else seeds
        setup = dump(
            [env_fns, self.options, num_steps, is_double_buffered, own_seeds, [entry for entry in sys.path if entry]]
        )
        demand = {} if machine else cluster.demand_of(self._module, self.nodes, self.options.num_workers or 1)
        placing = cluster.placed(self._module, self.nodes, demand, machine=machine)
        self._actors[node] = actor = self._module.remote(RolloutHost).options(**placing).remote(setup)
        if is_replacement and not machine:
            self._restarts[node] += 1
            lost = self._lost_error(node, "it was not replaced")
            self._searches[node] = PlaceSearch(self._module, self.nodes, demand, lost, lost.env_ids)
        actor.set_policy.remote(self.version, self._policy)
        for _ in range(MAX_IN_FLIGHT):
            self._orders[actor.collect.remote()] = node

    def set_policy(self, policy: Policy) -> int:
        """Send a new policy to all nodes, which use it from their next fragment on; return its version, which counts from 1.

        Fragments that are being collected are completed with the policy that began them. See `Fragment.version`.
        """
        self._check_open()
        self._policy, self.version = _dumped("policy", [policy])[0], self.version + 1
        shared = self._module.put(self._policy)
        for actor in self._actors:
            actor.set_policy.remote(self.version, shared)
        return self.version

    def recv(self, timeout_s: float | None = None) -> Fragment:
        """Return the next fragment of any node, and order another one from that node.

        Raises:
            RecvTimeout: no fragment is complete within `timeout_s` seconds. Nothing is lost.
            EnvError, WorkerDied: a node's pool raised it, or the node was lost, with on_fault="raise" or too often.
            Exception: the policy raised it. It has the traceback of the node. The node's envs are reset.
        """
        self._check_open()
        if self._collected:
            return self._collected.pop(min(self._collected))
        return self._next(range(self.num_nodes), time.monotonic(), timeout_s)

    def collect(self, timeout_s: float | None = None) -> list[Fragment]:
        """Return one fragment of each node, by node: T steps of all envs.

        Raises:
            As for `recv`.
        """
        self._check_open()
        began = time.monotonic()
        while missing := [node for node in range(self.num_nodes) if node not in self._collected]:
            fragment = self._next(missing, began, timeout_s)
            self._collected[fragment.node] = fragment
        fragments, self._collected = self._collected, {}
        return [fragments[node] for node in range(self.num_nodes)]

    def _next(self, nodes: Sequence[int], began: float, timeout_s: float | None) -> Fragment:
        """Return the next fragment of one of these nodes."""
        for node in range(self.num_nodes):
            search = self._searches.get(node)
            if node not in self._orders.values() or (search is not None and search.gave_up_at):
                self._start(node, is_replacement=True)
        while True:
            refs = {node: ref for ref, node in reversed(self._orders.items()) if node in nodes}  # the oldest of each
            left_s = math.inf if timeout_s is None else max(0.0, began + timeout_s - time.monotonic())
            slice_s = min(left_s, CHECK_S if self._searches else MAX_WAIT_S)
            done, _ = self._module.wait(list(refs.values()), num_returns=1, timeout=slice_s)
            fragment = self._receive(done[0]) if done else None
            if fragment is not None:
                return fragment
            for node, search in list(self._searches.items()):
                if shared := search.shared_machines():
                    self._start(node, is_replacement=True, machine=shared[0])
            if not done and slice_s == left_s:
                text = f"nodes {sorted(refs)} have not finished their steps within {timeout_s} s; call again"
                raise RecvTimeout(text, timeout_s=timeout_s or 0.0)

    def _receive(self, ref: Any) -> Fragment | None:
        """Return a fragment; None if its node was lost and has been replaced."""
        node = self._orders[ref]
        self._searches.pop(node, None)  # its actor has run
        try:
            result = self._module.get(ref)
        except self._module.exceptions.RayTaskError:
            self._order_after(ref)
            raise  # the error also has the class of the policy's error
        except self._module.exceptions.RayError as exc:
            self._replace(node, exc)
            return None
        self._order_after(ref)
        if isinstance(result, StepmillError):
            raise result
        version, is_first, batch = result
        return Fragment(node, self._env_ids[node], version, is_first, batch)

    def _order_after(self, ref: Any) -> None:
        """Order another fragment from the node of a fragment that was received."""
        node = self._orders.pop(ref)
        self._orders[self._actors[node].collect.remote()] = node

    def _replace(self, node: int, cause: BaseException) -> None:
        """Start a new actor in place of one that is lost.

        Raises:
            WorkerDied: the policy or the limit of restarts forbids it. The next `recv` or `collect` starts it.
        """
        self._orders = {ref: owner for ref, owner in self._orders.items() if owner != node}
        now, options = time.monotonic(), self.options
        times = self._times[node] = [at for at in self._times[node] if now - at < options.restarts.restart_window_s]
        times.append(now)
        if options.on_fault is OnFault.RAISE or len(times) > options.restarts.max_restarts:
            raise self._lost_error(node, str(cause).strip().splitlines()[0]) from cause
        self._start(node, is_replacement=True)

    def _lost_error(self, node: int, cause: str) -> WorkerDied:
        ids = self._env_ids[node].tolist()
        text = f"node {node} was lost, and with it the fragment of its envs {ids}: {cause}; recv() or collect() starts it again"
        return WorkerDied(text, worker=node, env_ids=ids, node=f"node {node}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedPoolError("the rollout is closed; make a new one")

    def close(self) -> None:
        """Close the envs and end the actors. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors:
            cluster.kill(self._module, actor)  # the workers end with their actor
        self._orders.clear()


def _dumped(what: str, values: Sequence[object]) -> list[bytes]:
    try:
        return [dump(value) for value in values]
    except Exception as exc:
        raise UsageError(
            f"{what} cannot be sent to the nodes: {type(exc).__name__}: {exc}; create inside it what cannot be pickled"
        ) from exc


def joined(fragments: Sequence[Fragment]) -> RolloutBatch:
    """Return the fragments of all nodes as one batch [T, N, ...], in the order of env_ids. The arrays are copies."""
    from stepmill.spec.tree import map_nest

    def stack(*parts: Any) -> Any:
        return np.concatenate(parts, axis=1)

    batches = [fragment.batch for fragment in fragments]
    starts = [int(fragment.env_ids[0]) for fragment in fragments]
    columns = np.cumsum([0, *(batch.reward.shape[1] for batch in batches)])
    first, rest = batches[0], batches[1:]
    fields: Mapping[str, Any] = {
        name: stack(*(getattr(batch, name) for batch in batches))
        for name in ("reward", "terminated", "truncated", "valid")
    }
    return dataclasses.replace(
        first,
        obs=map_nest(stack, first.obs, *(batch.obs for batch in rest)),
        action=map_nest(stack, first.action, *(batch.action for batch in rest)),
        final_at=np.concatenate(
            [batch.final_at + np.array([0, column]) for batch, column in zip(batches, columns[:-1], strict=True)]
        ),
        final_obs=map_nest(lambda *parts: np.concatenate(parts), first.final_obs, *(batch.final_obs for batch in rest)),
        extras={name: stack(*(batch.extras[name] for batch in batches)) for name in first.extras},
        episodes=[
            {**episode, "env_id": episode["env_id"] + start}
            for batch, start in zip(batches, starts, strict=True)
            for episode in batch.episodes
        ],
        **fields,
    )
