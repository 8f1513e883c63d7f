"""`TensorPool`: a `Pool` that takes and gives tensors, on the CPU without copies or on a GPU by copies that overlap.

    device="cpu"     tensors are views of the arrays that the pool lends: `torch.from_numpy` holds the lease
    device="cuda"    the slab's pages are locked once; each batch is copied on a stream of its own while the envs go on, and its
                     lease ends when the copy has

What differs between the two is behind `Courier`; `HostCourier` does on the CPU what `CudaCourier` does on a GPU, so that all but
the calls of CUDA itself is tested without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.pool import EnvIds, Pool
from stepmill.spec.batch import Batch
from stepmill.spec.errors import MissingExtraError, UsageError
from stepmill.spec.tree import map_nest

try:
    import torch
except ImportError as exc:
    raise MissingExtraError(module="torch", extra="torch") from exc

if TYPE_CHECKING:
    from typing_extensions import Self

IsDone = Callable[[], bool]


class Courier(Protocol):
    """Takes arrays from shared memory to a device.

    `carry` begins a copy and returns the tensor with a function that says whether the copy is done; whoever uses the tensor on
    the device's current stream waits for it there, not here. `finish` waits for all copies and lets go of the memory.
    """

    device: torch.device

    def carry(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]: ...
    def finish(self) -> None: ...


class CudaCourier:
    """Copies on a stream of its own, from pages that are locked for as long as this lives.

    Args:
        device: of CUDA.
        address, size_bytes: the memory that most arrays lie in.
    Raises:
        UsageError: the pages cannot be locked, as when `ulimit -l` does not allow it.
    """

    def __init__(self, device: torch.device, address: int, size_bytes: int) -> None:
        self.device = device
        self._address = address
        self._stream = torch.cuda.Stream(device)
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        if status != 0:
            raise UsageError(
                f"{size_bytes} bytes of shared memory cannot be locked for CUDA (status {status}); raise `ulimit -l`, or use "
                "device='cpu' and copy yourself"
            )

    def carry(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]:
        """Begin a copy on the courier's stream; the device's current stream waits for it."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            tensor = torch.from_numpy(array).to(self.device, non_blocking=True)
            event = self._stream.record_event()
        current.wait_event(event)
        tensor.record_stream(current)
        return tensor, event.query

    def finish(self) -> None:
        """Wait for all copies, and unlock the pages."""
        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._address)


class HostCourier:
    """The twin of `CudaCourier` without a GPU: copies at once, and says that a copy is done when `is_done` says so.

    Attributes:
        is_done: asked for every copy; a test can hold copies back with it.
    """

    def __init__(self, is_done: IsDone = lambda: True) -> None:
        self.device = torch.device("cpu")
        self.is_done = is_done

    def carry(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]:
        """Copy."""
        return torch.from_numpy(array).clone(), self.is_done

    def finish(self) -> None:
        """Nothing is under way."""


class TensorPool:
    """A pool whose batches hold tensors. Its methods are those of `Pool`; what is not here is in `pool`.

    Args:
        pool: is closed with this.
        device: "cpu" lends tensors without a copy; one of CUDA copies, overlapped; or a `Courier`.
        reward_dtype: of rewards, which envs give as float64.

    Batches are as those of `Pool`, with tensors [B, ...] on the device for obs, reward, terminated and truncated; `env_id` is
    an int64 tensor on the CPU. On the CPU a tensor may be kept as long as one likes, and its memory is not written meanwhile.
    """

    def __init__(
        self, pool: Pool, device: str | torch.device | Courier = "cpu", *, reward_dtype: torch.dtype = torch.float32
    ) -> None:
        if not isinstance(pool, Pool):
            raise UsageError(
                f"pool is a {type(pool).__name__}; give a stepmill.Pool(env_fns), which is closed with this"
            )
        self.pool = pool
        self.reward_dtype = reward_dtype
        self._courier = _courier_for(pool, device)
        self.device = torch.device("cpu") if self._courier is None else self._courier.device
        # Arrays whose copies are under way, with what says that they are done: they hold their leases.
        self._held: deque[tuple[NDArray[Any], IsDone]] = deque()

    @property
    def num_held(self) -> int:
        """How many arrays wait for their copies to be done."""
        self._release()
        return len(self._held)

    def reset(self, **arguments: Any) -> Batch:
        """Reset envs and wait for them; see `Pool.reset`."""
        return self._as_tensors(self.pool.reset(**arguments))

    def step(self, actions: Any) -> Batch:
        """Step all envs; actions are tensors [N, ...], on any device, in the structure of the action space."""
        self.pool.send(_as_arrays(actions))
        return self.recv(self.pool.num_envs)

    def send(self, actions: Any, env_ids: EnvIds | torch.Tensor | None = None) -> None:
        """Give actions to envs; see `Pool.send`."""
        ids = env_ids.cpu().numpy() if isinstance(env_ids, torch.Tensor) else env_ids
        self.pool.send(_as_arrays(actions), ids)

    def recv(self, batch_size: int | None = None, **arguments: Any) -> Batch:
        """Return envs that finished; see `Pool.recv`."""
        return self._as_tensors(self.pool.recv(batch_size, **arguments))

    def close(self) -> None:
        """Wait for copies that are under way, and close the pool."""
        if self._courier is not None:
            self._courier.finish()
            self._courier = None
        self._held.clear()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _as_tensors(self, batch: Batch) -> Batch:
        self._release()
        return replace(
            batch,
            obs=map_nest(self._take, batch.obs),
            reward=self._take(batch.reward).to(self.reward_dtype),
            terminated=self._take(batch.terminated),
            truncated=self._take(batch.truncated),
            env_id=torch.from_numpy(batch.env_id),
        )

    def _take(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array  # a part of no fixed size stays as it is
        if self._courier is None:
            return torch.from_numpy(array)
        tensor, is_done = self._courier.carry(array)
        self._held.append((array, is_done))
        return tensor

    def _release(self) -> None:
        # Copies of one stream are done in the order in which they began.
        while self._held and self._held[0][1]():
            self._held.popleft()


def _courier_for(pool: Pool, device: str | torch.device | Courier) -> Courier | None:
    """Return what takes batches to a device; None if they stay where they are."""
    if not isinstance(device, (str, torch.device)):
        return device
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return None
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"device={device!r} is not there; use 'cpu', or a device of CUDA on a machine that has one")
    return CudaCourier(chosen, *pool.memory_place)


def _as_arrays(actions: Any) -> Any:
    return map_nest(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf, actions)
