"""The settings that the native code of the learner and of the workers shares."""

from __future__ import annotations

from stepmill.spec.choices import AutoresetMode, Seeding
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Node, leaves, program
from stepmill.worker.messages import dump, load

# The numbers are those of `_native/worker/loop.hpp`.
_AUTORESET_NUMBERS = {AutoresetMode.NEXT_STEP: 0, AutoresetMode.SAME_STEP: 1, AutoresetMode.DISABLED: 2}
_SEEDING_NUMBERS = {Seeding.CONTINUE: 0, Seeding.PER_EPISODE: 1, Seeding.FIXED: 2}


def native_settings(spec: EnvSpec, autoreset: AutoresetMode, seeding: Seeding) -> dict[str, object]:
    """Return the settings that native code needs to step envs with this spec."""
    return {
        "observation": program(spec.observation),
        "observation_leaves": _leaf_types(spec.observation),
        "action": program(spec.action),
        "action_leaves": _leaf_types(spec.action),
        "info": program(spec.info),
        "info_leaves": _leaf_types(spec.info),
        "reward": (spec.reward.dtype, spec.reward.shape),
        "batched": spec.is_batched,
        "autoreset": _AUTORESET_NUMBERS[autoreset],
        "seeding": _SEEDING_NUMBERS[seeding],
        "pickler": dump,
        "unpickler": load,
    }


def _leaf_types(node: Node) -> list[tuple[object, tuple[int, ...]]]:
    return [(leaf.dtype, leaf.shape) for _, leaf in leaves(node)]
