"""stepmill's Pool, asynchronous: options `backend`, `num_workers`, `batch_size`."""

from __future__ import annotations

import stepmill
from benchmarks.adapters.base import Adapter


class Engine(Adapter):
    """`recv` a batch, read it, and `send` the same envs their next actions."""

    def start(self) -> None:
        options = self.job.options
        self.batch_size: int = options.get("batch_size", self.num_envs)
        self.pool = stepmill.Pool(
            self.job.env_fns,
            backend=options["backend"],
            num_workers=options["num_workers"],
            batch_size=self.batch_size,
            options=stepmill.PoolOptions(**options.get("pool", {})),
        )
        self.pool.reset(seed=0)
        self.pool.send(self.next_actions())
        self.actions = [actions[: self.batch_size] for actions in self.actions]

    def advance(self) -> int:
        batch = self.pool.recv()
        self.ended = (batch.terminated, batch.truncated)
        if self.job.is_timed:
            self.record_times(batch.obs)
        else:
            batch.obs.item(0)
        batch.reward.item(-1)
        self.pool.send(self.next_actions(), batch.env_id)
        return self.batch_size

    def close(self) -> None:
        self.pool.close()
