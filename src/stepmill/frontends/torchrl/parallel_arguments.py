"""The keyword arguments of TorchRL's `ParallelEnv` that `StepmillEnv` takes: they are options here, or refused by name."""

from __future__ import annotations

from typing import Any, TypedDict

from stepmill.spec.errors import UsageError
from stepmill.spec.options import Workers
from stepmill.spec.records import leaves_of


class ParallelKeywords(TypedDict, total=False):
    """The keyword arguments of ParallelEnv that `StepmillEnv` knows, other than EnvBase's and `create_env_kwargs`."""

    allow_step_when_done: bool
    auto_wrap_envs: bool
    consolidate: bool
    daemon: bool
    memmap: bool
    metadata_from_workers: bool
    mp_start_method: str | None
    non_blocking: bool
    num_sub_threads: int
    num_threads: int | None
    pin_memory: bool
    policy_proof: Any
    serial_for_single: bool
    share_individual_td: bool | None
    shared_memory: bool
    shutdown_timeout: float
    use_buffers: bool | None


_WITHOUT_EFFECT = ("auto_wrap_envs", "daemon", "metadata_from_workers")  # what they request is always the case
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # the values that are accepted; what to do instead of other values
    "allow_step_when_done": ((False,), "reset an env that is done, by a mask or by step_and_maybe_reset()"),
    "consolidate": ((True,), "leave it out: no tensordict is sent to a worker"),
    "memmap": ((False,), "leave it out: observations are in shared memory"),
    "non_blocking": ((False,), "call .to(device, non_blocking=True) on the results of an env on the CPU"),
    "num_threads": ((None,), "call torch.set_num_threads() in this process"),
    "pin_memory": ((False,), "call .pin_memory() on the results"),
    "policy_proof": ((None,), "leave it out, and wrap the policy"),
    "share_individual_td": ((None, False), "leave it out: the observations of all envs are one block of memory"),
    "shared_memory": ((True,), "use backend='thread' or backend='serial', which share no memory between processes"),
    "shutdown_timeout": ((), "leave it out: workers have 1.5 s to close their envs"),
    "use_buffers": ((None, True), "leave it out: observations are in shared memory"),
}


def pop_parallel_arguments(keywords: dict[str, Any], num_envs: int) -> None:
    """Replace the arguments of ParallelEnv in `keywords` by fields of PoolOptions, which take precedence where given.

    Raises:
        UsageError: a value is not supported; the text says what to do instead.
    """
    for name, (accepted, advice) in _REFUSED.items():
        if name in keywords and not any(keywords[name] is value for value in accepted):
            raise UsageError(f"{name}={keywords[name]!r} of ParallelEnv is not supported; {advice}")
        keywords.pop(name, None)
    for name in _WITHOUT_EFFECT:
        keywords.pop(name, None)
    if (context := keywords.pop("mp_start_method", None)) is not None:
        keywords.setdefault("context", context)
    if (num_threads := keywords.pop("num_sub_threads", None)) is not None:
        keywords["workers"] = {"threads": num_threads, **leaves_of(Workers, keywords.get("workers", {}))}
    if keywords.pop("serial_for_single", False) and num_envs == 1:
        keywords.setdefault("backend", "serial")
