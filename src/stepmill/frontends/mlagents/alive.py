"""Which agents of a worker are in the middle of an episode, so that a crash can end every one of those episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepmill.frontends.mlagents.steps import AllStepResult, BatchedStepResult, DecisionSteps, TerminalSteps

_Seen = dict[int, tuple[Any, int]]  # agent id: where it was last seen, and in which row


class AliveAgents:
    """The agents of one worker whose episodes are under way, and what was last seen of them.

    Agents ask for decisions at different times: who is not in the newest result may still be alive.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note(self, results: AllStepResult) -> None:
        """Take in a result."""
        for name, agents in results.items():
            seen = self._seen.setdefault(name, {})
            if isinstance(agents, tuple):
                decision, terminal = agents
                for agent in terminal.agent_id:
                    seen.pop(int(agent), None)
                for row, agent in enumerate(decision.agent_id):
                    seen[int(agent)] = (decision, row)
            else:
                _note_batch(seen, agents)

    def clear(self) -> None:
        """Forget them: a reset has ended all episodes."""
        self._seen.clear()

    def interrupted(self) -> AllStepResult:
        """Return the end of each episode that was under way: its last observation, no reward, interrupted."""
        return {name: _interrupt(seen) for name, seen in self._seen.items() if seen}


def _note_batch(seen: _Seen, agents: BatchedStepResult) -> None:
    for row, (agent, is_done) in enumerate(zip(agents.agent_id, agents.done, strict=True)):
        if is_done:
            seen.pop(int(agent), None)
        else:
            seen[int(agent)] = (agents, row)


def _interrupt(seen: _Seen) -> tuple[DecisionSteps, TerminalSteps] | BatchedStepResult:
    places = list(seen.values())
    size = len(places)
    first = places[0][0]
    obs = [np.stack([agents.obs[leaf][row] for agents, row in places]) for leaf in range(len(first.obs))]
    ids = np.array(list(seen), np.int32)
    no_reward, all_of_them = np.zeros(size, np.float32), np.ones(size, np.bool_)
    if isinstance(first, DecisionSteps):
        group = np.array([agents.group_id[row] for agents, row in places], np.int32)
        nobody = DecisionSteps([array[:0] for array in obs], no_reward[:0], ids[:0])
        return nobody, TerminalSteps(obs, no_reward, all_of_them, ids, group)
    mask = None
    if first.action_mask is not None:
        mask = [
            np.stack([agents.action_mask[branch][row] for agents, row in places])
            for branch in range(len(first.action_mask))
        ]
    return BatchedStepResult(obs, no_reward, all_of_them, all_of_them.copy(), ids, mask)
