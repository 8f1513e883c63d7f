"""`TensorPool`: a `Pool` that takes and returns tensors, on the CPU without copies, or on a GPU with asynchronous copies.

    device="cpu"     tensors are views of the arrays that the pool lends; `torch.from_numpy` holds the lease
    device="cuda"    the slab's pages are locked once; each batch is copied on a separate stream while the envs continue, and
                     its lease ends when the copy is done

`DeviceCopier` is the interface to a device. `HostCopier` does on the CPU what `CudaCopier` does on a GPU, so that everything
except the CUDA calls can be tested without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort
from stepmill.pool.receiving import EnvIds
from stepmill.spec.batch import Batch
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.tree import map_nest

with needs_extra("torch", "torch", ImportError):
    import torch

IsDone = Callable[[], bool]


class DeviceCopier(Protocol):
    """Copies arrays from shared memory to a device.

    `start_copy` starts a copy and returns the tensor with a function that returns whether the copy is done. It does not
    wait: the device's current stream waits for the copy. `finish` waits for all copies and releases the memory.
    """

    device: torch.device

    def start_copy(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]: ...
    def finish(self) -> None: ...


class CudaCopier:
    """Copies on a separate stream, from pages that stay locked until `finish`.

    Args:
        device: a CUDA device.
        address, size_bytes: the memory that contains most arrays.
    Raises:
        UsageError: the pages cannot be locked, for example because `ulimit -l` does not allow it.
    """

    def __init__(self, device: torch.device, address: int, size_bytes: int) -> None:
        self.device = device
        self._address = address
        self._stream = torch.cuda.Stream(device)
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        if status != 0:
            raise UsageError(
                f"cannot lock {size_bytes} bytes of shared memory for CUDA (status {status}); raise `ulimit -l`, or use "
                "device='cpu' and copy the tensors yourself"
            )

    def start_copy(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]:
        """Start a copy on this copier's stream; the device's current stream waits for it."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            tensor = torch.from_numpy(array).to(self.device, non_blocking=True)
            event = self._stream.record_event()
        current.wait_event(event)
        tensor.record_stream(current)
        return tensor, event.query

    def finish(self) -> None:
        """Wait for all copies and unlock the pages."""
        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._address)


class HostCopier:
    """Replaces `CudaCopier` without a GPU. It copies at once, and a copy counts as done when `is_done` returns True.

    Attributes:
        is_done: called for every copy; a test can delay the end of copies with it.
    """

    def __init__(self, is_done: IsDone = lambda: True) -> None:
        self.device = torch.device("cpu")
        self.is_done = is_done

    def start_copy(self, array: NDArray[Any]) -> tuple[torch.Tensor, IsDone]:
        """Copy the array at once."""
        return torch.from_numpy(array).clone(), self.is_done

    def finish(self) -> None:
        """Do nothing, because no copy is running."""


class TensorPool(CloseAtEnd):
    """A pool whose batches contain tensors. Its methods work like `Pool`'s; for other methods use the attribute `pool`.

    Args:
        pool: the pool, which is closed together with this object.
        device: "cpu" lends tensors without a copy; a CUDA device copies asynchronously; or a `DeviceCopier`.
        reward_dtype: the dtype of rewards, which envs return as float64.

    Batches are those of `Pool`, with tensors [B, ...] on the device for obs, reward, terminated and truncated; `env_id` is an
    int64 tensor on the CPU. A tensor on the CPU stays valid as long as it is referenced.
    """

    def __init__(
        self,
        pool: Pool,
        device: str | torch.device | DeviceCopier = "cpu",
        *,
        reward_dtype: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(pool, Pool):
            raise UsageError(f"pool is a {type(pool).__name__}; give a stepmill.Pool(env_fns)")
        self.pool = pool
        self.reward_dtype = reward_dtype
        self._copier = _copier_for(pool, device)
        self.device = torch.device("cpu") if self._copier is None else self._copier.device
        # Arrays that are being copied; the reference keeps their leases until the copy is done.
        self._copying: deque[tuple[NDArray[Any], IsDone]] = deque()

    @property
    def num_held(self) -> int:
        """The number of arrays that are held until they are copied."""
        self._drop_copied()
        return len(self._copying)

    def reset(self, **arguments: Any) -> Batch:
        """Reset envs and wait for them; see `Pool.reset`."""
        return self._as_tensors(self.pool.reset(**arguments))

    def step(self, actions: Any) -> Batch:
        """Step all envs. Actions are tensors [N, ...] on any device, in the structure of the action space."""
        return self._as_tensors(self.pool.step(_as_arrays(actions)))

    def send(self, actions: Any, env_ids: EnvIds | torch.Tensor | None = None) -> None:
        """Send actions to envs; see `Pool.send`. Actions are tensors on any device."""
        ids = env_ids.cpu().numpy() if isinstance(env_ids, torch.Tensor) else env_ids
        self.pool.send(_as_arrays(actions), ids)

    def recv(self, batch_size: int | None = None, **arguments: Any) -> Batch:
        """Return envs that finished; see `Pool.recv`."""
        return self._as_tensors(self.pool.recv(batch_size, **arguments))

    def close(self) -> None:
        """Wait for running copies, and close the pool."""
        if self._copier is not None:
            self._copier.finish()
            self._copier = None
        self._copying.clear()
        self.pool.close()

    def _as_tensors(self, batch: Batch) -> Batch:
        self._drop_copied()
        return replace(
            batch,
            obs=map_nest(self._to_tensor, batch.obs),
            reward=self._to_tensor(batch.reward).to(self.reward_dtype),
            terminated=self._to_tensor(batch.terminated),
            truncated=self._to_tensor(batch.truncated),
            env_id=torch.from_numpy(batch.env_id),
        )

    def _to_tensor(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array  # a part without a fixed size is not converted
        if self._copier is None:
            return torch.from_numpy(array)
        tensor, is_done = self._copier.start_copy(array)
        self._copying.append((array, is_done))
        return tensor

    def _drop_copied(self) -> None:
        # Copies on one stream end in the order in which they start.
        while self._copying and self._copying[0][1]():
            self._copying.popleft()


def _copier_for(pool: Pool, device: str | torch.device | DeviceCopier) -> DeviceCopier | None:
    """Return the copier for a device; None if nothing is copied."""
    if not isinstance(device, (str, torch.device)):
        return device
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return None
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"device={device!r} is not available; use 'cpu', or 'cuda' on a machine with a GPU")
    return CudaCopier(chosen, *PoolPort(pool).memory_place)


def _as_arrays(actions: Any) -> Any:
    return map_nest(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf, actions)
