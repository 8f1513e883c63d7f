"""Divides the envs of a pool among workers and their threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stepmill.pool.auto_backend import EnvFn, choose_backend
from stepmill.pool.spinning import worker_cores
from stepmill.spec.option_values import cores_of, environment_of
from stepmill.spec.options import BackendName, PoolOptions
from stepmill.spec.ray_options import hosts_kernels
from stepmill.worker.messages import WorkerPlan


def plan_workers(env_fns: Sequence[EnvFn], options: PoolOptions) -> list[WorkerPlan]:
    """Divide the envs among the workers, in contiguous ranges of almost equal size.

    The spares come last, and are spread evenly.
    """
    num_envs, choice = len(env_fns), choose_backend(env_fns, options)
    max_lanes = options.workers.threads_per_worker if choice is BackendName.PROCESS else 1
    if choice in (BackendName.SERIAL, BackendName.ENVPOOL, BackendName.KERNEL):
        num_workers = 1
    elif hosts_kernels(options.ray):
        num_workers = options.ray.num_nodes or 1  # `connect_ray` has set it
    elif options.envs_per_worker is not None:
        num_workers = -(-num_envs // options.envs_per_worker)
    elif options.num_workers is None and max_lanes > 1:
        num_workers = -(-num_envs // max_lanes)
    else:
        num_workers = options.num_workers or worker_cores(options)
    num_workers = min(num_workers, num_envs)
    bounds = [worker * num_envs // num_workers for worker in range(num_workers + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    spares: list[list[int]] = [[] for _ in sizes]
    for place in range(options.resets.spare_envs):
        worker = num_workers - 1 - place * num_workers // options.resets.spare_envs
        while len(spares[worker]) == sizes[worker]:
            worker -= 1  # worker 0 comes last, and is never the only worker with space left
        spares[worker].append(num_envs - options.resets.spare_envs + place)
    ids = iter(range(num_envs - options.resets.spare_envs))
    shares = [(*itertools.islice(ids, size - len(extra)), *extra) for size, extra in zip(sizes, spares, strict=True)]
    num_lanes = [min(max_lanes, len(own)) for own in shares]
    return [
        WorkerPlan(
            worker,
            own,
            tuple(env_fns[i] for i in own),
            init=options.workers.init,
            affinity=cores_of(options.workers.affinity, worker),
            environ={
                **environment_of(options.workers.env, worker),
                "STEPMILL_WORKER": str(worker),
                "STEPMILL_NUM_WORKERS": str(num_workers),
                "STEPMILL_ENV_IDS": ",".join(map(str, own)),
            },
            first_lane=sum(num_lanes[:worker]),
            num_lanes=num_lanes[worker],
        )
        for worker, own in enumerate(shares)
    ]


def count_threads(num_envs: int, options: PoolOptions) -> int:
    """Return how many threads run the envs of a kernel, including the caller's."""
    return min(options.num_workers or worker_cores(options), num_envs)
