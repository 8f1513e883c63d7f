"""How many steps per second a configuration is expected to make, and which backend `"auto"` is. Nothing is measured here.

    EnvProfile (what a step and a reset take) + Machine ──► predict(configuration) ──► env-steps per second

`backend="auto"` and `stepmill tune` use the same function. `tune` knows the profile; "auto" knows it for few envs.

Letters in shapes: N envs, W workers, S samples of a step of all envs.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stepmill.slab.layout import LEASE_BYTES
from stepmill.spec.options import BackendName

# What the engine needs in addition to the envs, in seconds, on the machine of docs/performance.md.
CALL_S = 1.5e-6  # a call of step(), or of recv() and send()
ROW_S = 0.15e-6  # to build an action and to write a result
HAND_OFF_S = 2e-6  # to give a command to a worker that spins
WAKE_S = 50e-6  # to wake the first worker that sleeps, and the learner: decision 0019
WAKE_NEXT_S = 6e-6  # to wake each worker
GIL_S = 8e-6  # to hand the GIL to a thread and back
COPY_BYTES_PER_S = 5e9
LONGEST_SPIN_S = 1e-3  # decision 0014
KERNEL_WAKE_S = 3e-6

NUM_SAMPLED_ROWS = 1 << 17
NUM_SIMULATED_ROWS = 6000
AUTO_WORKERS = 2

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EnvProfile:
    """What one env costs.

    Attributes:
        steps_s: durations of steps in seconds that are equally frequent, in ascending order: the distribution.
        reset_s: mean duration of a reset.
        episode_steps: mean number of steps per episode; infinity if no episode ended.
        is_length_fixed: all episodes have the same length, so that envs that began together are reset together.
        obs_bytes: size of an observation.
        cpu_share: the part of these durations in which the env uses a core, 0 to 1. The rest is spent waiting.
        gil_share: the part of the time on a core in which the env holds the GIL, 0 to 1.
        kernel_step_s: duration of a step of the same env as a kernel; None if there is no kernel.
        num_rows: how many envs a batched env has.
    """

    steps_s: tuple[float, ...]
    reset_s: float = 0.0
    episode_steps: float = math.inf
    is_length_fixed: bool = False
    obs_bytes: int = 0
    cpu_share: float = 1.0
    gil_share: float = 1.0
    kernel_step_s: float | None = None
    num_rows: int = 1

    @property
    def step_s(self) -> float:
        """The mean duration of a step."""
        return sum(self.steps_s) / len(self.steps_s)

    @property
    def reset_chance(self) -> float:
        """The part of the rows of a pool that are resets: an episode of T steps has one (NEXT_STEP)."""
        return 1 / (self.episode_steps + 1)

    @property
    def row_s(self) -> float:
        """The mean duration of what a row of a batch takes, a step or a reset."""
        return (1 - self.reset_chance) * self.step_s + self.reset_chance * self.reset_s


@dataclass(frozen=True)
class Machine:
    """What the configuration runs on.

    Attributes:
        cores: usable cores.
        learner_s: seconds in which the learner computes between two batches.
    """

    cores: int
    learner_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How the envs are run. The defaults are those of PoolOptions.

    Attributes:
        batch_size: `recv` waits for this number of envs; None steps all envs together.
    """

    backend: BackendName
    num_workers: int = 1
    batch_size: int | None = None
    spin_us: float | None = None
    copy: bool = False
    spare_envs: int = 0
    overlap_resets: bool = False

    def keywords(self) -> dict[str, object]:
        """Return what differs from the defaults, as keywords of `make_vec`, `VectorEnv` and `Pool`."""
        found: dict[str, object] = {"backend": self.backend.value}
        if self.backend is not BackendName.SERIAL:
            found["num_workers"] = self.num_workers
        if self.spin_us is not None:
            found["spin_us"] = self.spin_us
        if self.copy:
            found["copy"] = True
        if self.spare_envs:
            found["spare_envs"] = self.spare_envs
        if self.overlap_resets:
            found["overlap_resets"] = True
        return found

    @property
    def complexity(self) -> tuple[int, ...]:
        """A key that sorts simpler configurations first."""
        extras = (self.spare_envs > 0) + self.overlap_resets + (self.spin_us is not None) + self.copy
        return (self.batch_size is not None, _RANKS[self.backend], extras, self.num_workers, self.spare_envs)

    def __str__(self) -> str:
        parts = [self.backend.value]
        if self.backend is not BackendName.SERIAL:
            what = "thread" if self.backend in (BackendName.THREAD, BackendName.KERNEL) else "worker"
            parts.append(f"{self.num_workers} {what}{'s' if self.num_workers > 1 else ''}")
        if self.batch_size is not None:
            parts.append(f"batches of {self.batch_size}")
        if self.spare_envs:
            parts.append(f"{self.spare_envs} spare{'s' if self.spare_envs > 1 else ''}")
        if self.overlap_resets:
            parts.append("overlap_resets")
        if self.spin_us is not None:
            parts.append(f"spin_us={self.spin_us:g}")
        if self.copy:
            parts.append("copy=True")
        return ", ".join(parts)


_RANKS = {
    backend: rank
    for rank, backend in enumerate((BackendName.SERIAL, BackendName.THREAD, BackendName.PROCESS, BackendName.KERNEL))
}


def predict(profile: EnvProfile, machine: Machine, configuration: Configuration, num_envs: int) -> float:
    """Return the expected rows per second, automatic resets included."""
    if configuration.batch_size is None or configuration.batch_size == num_envs:
        period_s = _period_in_step(profile, machine, configuration, num_envs)
        num_rows = num_envs
    else:
        period_s = _period_async(profile, machine, configuration, num_envs)
        num_rows = configuration.batch_size
    return num_rows * profile.num_rows / period_s


def auto_backend(num_envs: int, *, num_workers: int | None = None, step_s: float | None = None) -> BackendName:
    """Return the backend that "auto" is: serial or process. The result depends on the arguments alone.

    Args:
        num_envs: N.
        num_workers: the option; 0 is serial.
        step_s: duration of a step in seconds, if it is known. Without it, workers are the safer choice: decision 0019.
    """
    if num_envs == 1 or num_workers == 0:
        return BackendName.SERIAL
    if step_s is None:
        return BackendName.PROCESS
    # A learner that computes for longer than workers spin must wake them in every step. The number of cores is not asked
    # for, so that a program uses the same backend on all machines; more workers also cost more to wake.
    machine = Machine(cores=AUTO_WORKERS, learner_s=2 * LONGEST_SPIN_S)
    profile = EnvProfile(steps_s=(step_s,))
    serial = Configuration(backend=BackendName.SERIAL)
    process = Configuration(backend=BackendName.PROCESS, num_workers=AUTO_WORKERS)
    is_process_faster = predict(profile, machine, process, num_envs) > predict(profile, machine, serial, num_envs)
    return BackendName.PROCESS if is_process_faster else BackendName.SERIAL


# ---- all envs together -----------------------------------------------------------------------------------------------


def _period_in_step(profile: EnvProfile, machine: Machine, configuration: Configuration, num_envs: int) -> float:
    """Return the seconds from one step of all envs to the next."""
    backend, num_workers = configuration.backend, min(configuration.num_workers, num_envs + configuration.spare_envs)
    own_s = CALL_S + num_envs * ROW_S + machine.learner_s
    if backend is BackendName.KERNEL:
        kernel_s = num_envs * (profile.kernel_step_s or profile.step_s)
        return own_s + kernel_s / min(num_workers, machine.cores) + (num_workers - 1) * KERNEL_WAKE_S
    own_s += _copying_s(profile, num_envs, is_lent=not configuration.copy)
    delay_s = _reset_delay_s(profile, machine, configuration, num_envs)
    rows_s, hidden_s = _sampled_rows(profile, num_envs, delay_s)
    if backend is BackendName.SERIAL:
        return own_s + float(rows_s.sum(axis=1).mean())
    num_used = min(num_workers, num_envs)
    bounds = [worker * num_envs // num_used for worker in range(num_used)]
    slowest_s = np.add.reduceat(rows_s, bounds, axis=1).max(axis=1)
    # The whole time on cores, of hidden resets too, is divided among the cores. Only one thread at a time has the GIL.
    cpu_s = profile.cpu_share * (rows_s + hidden_s).sum(axis=1)
    shared_s = cpu_s / min(machine.cores, num_workers)
    if backend is BackendName.THREAD:
        shared_s = np.maximum(shared_s, profile.gil_share * cpu_s)
    envs_s = float(np.maximum(slowest_s, shared_s).mean())
    return own_s + envs_s + _signalling_s(machine, configuration, num_used, envs_s)


def _signalling_s(machine: Machine, configuration: Configuration, num_workers: int, wait_s: float) -> float:
    """Return what it takes to give commands to workers, and to learn that they have finished."""
    total_s = (1 + num_workers) * HAND_OFF_S
    is_asleep = configuration.spin_us == 0 or machine.learner_s > LONGEST_SPIN_S or wait_s > LONGEST_SPIN_S
    if is_asleep:
        total_s += WAKE_S + num_workers * WAKE_NEXT_S
    if configuration.backend is BackendName.THREAD:
        total_s += num_workers * GIL_S
    return total_s


def _copying_s(profile: EnvProfile, batch_size: int, *, is_lent: bool) -> float:
    """Return what it takes to copy the observations of a batch; nothing if they are lent."""
    size_bytes = batch_size * profile.obs_bytes
    return 0.0 if is_lent and size_bytes >= LEASE_BYTES else size_bytes / COPY_BYTES_PER_S


def _reset_delay_s(profile: EnvProfile, machine: Machine, configuration: Configuration, num_envs: int) -> float:
    """Return by how much a reset delays the row that needs it.

    A worker that resets a spare cannot step its other envs, so spares help if each env object has its own worker, and if there is
    one for each env that is reset at the same time. A reset that overlaps begins as soon as the episode has ended, while the learner computes.
    """
    num_spares = configuration.spare_envs
    if num_spares:
        is_hidden = configuration.num_workers >= num_envs + num_spares
        is_hidden = is_hidden and (num_spares >= num_envs or not profile.is_length_fixed)
        return 0.0 if is_hidden else profile.reset_s
    is_overlapped = configuration.overlap_resets and configuration.backend is not BackendName.SERIAL
    return max(0.0, profile.reset_s - machine.learner_s) if is_overlapped else profile.reset_s


@lru_cache(maxsize=8)
def _sampled_rows(profile: EnvProfile, num_envs: int, reset_delay_s: float) -> tuple[Floats, Floats]:
    """Return samples of the durations of all rows [S, N], and of the parts of resets that do not delay them [S, N].

    All configurations of one profile are compared on the same samples.
    """
    are_equal = len(profile.steps_s) == 1 and not profile.reset_chance  # as for "auto", which is asked at each start
    num_samples = 1 if are_equal else max(16, NUM_SAMPLED_ROWS // num_envs)
    generator = np.random.default_rng(0)
    quantiles = np.asarray(profile.steps_s)
    rows_s = quantiles[(generator.random((num_samples, num_envs)) * len(quantiles)).astype(np.intp)]
    shape = (num_samples, 1 if profile.is_length_fixed else num_envs)
    is_reset = np.broadcast_to(generator.random(shape) < profile.reset_chance, rows_s.shape)
    rows_s[is_reset] = reset_delay_s
    hidden_s = np.where(is_reset, profile.reset_s - reset_delay_s, 0.0)
    rows_s.setflags(write=False)
    hidden_s.setflags(write=False)
    return rows_s, hidden_s


# ---- the envs that are ready -----------------------------------------------------------------------------------------


def _period_async(profile: EnvProfile, machine: Machine, configuration: Configuration, num_envs: int) -> float:
    """Return the mean seconds from one batch to the next: workers step their envs in the order of the commands."""
    batch_size = configuration.batch_size or num_envs
    num_workers = min(configuration.num_workers, num_envs)
    rows_s = _sampled_rows(profile, num_envs, profile.reset_s)[0].ravel()
    is_busy = profile.row_s * num_envs / num_workers < LONGEST_SPIN_S
    wake_s = HAND_OFF_S if is_busy and configuration.spin_us != 0 else WAKE_NEXT_S
    own_s = CALL_S + batch_size * ROW_S + machine.learner_s
    own_s += _copying_s(profile, batch_size, is_lent=False) + min(batch_size, num_workers) * wake_s
    num_batches = -(-NUM_SIMULATED_ROWS // batch_size)
    free_s = [0.0] * num_workers
    ready = [(0.0, env_id) for env_id in range(num_envs)]
    now_s, begun_s, next_row = 0.0, 0.0, 0
    for batch in range(num_batches + num_envs // batch_size):
        if batch == num_envs // batch_size:
            begun_s = now_s  # all envs have been sent
        taken = [heapq.heappop(ready) for _ in range(batch_size)]
        now_s = max(now_s, taken[-1][0]) + own_s
        for _, env_id in taken:
            worker = env_id * num_workers // num_envs
            free_s[worker] = max(now_s, free_s[worker]) + float(rows_s[next_row % len(rows_s)])
            heapq.heappush(ready, (free_s[worker], env_id))
            next_row += 1
    row_cpu_s = profile.cpu_share * profile.row_s
    least_s = row_cpu_s / min(machine.cores, num_workers)
    if configuration.backend is BackendName.THREAD:
        least_s = max(least_s, profile.gil_share * row_cpu_s + GIL_S)
    return max((now_s - begun_s) / num_batches, batch_size * least_s)
