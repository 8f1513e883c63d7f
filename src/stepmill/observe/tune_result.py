"""The result of `stepmill tune`: plain data, its text, and the program that makes envs in the configuration that was chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from stepmill.observe.catalog import FRAME_SKIP, SCREEN_SIZE_PX, STACK_SIZE, EnvChoice
from stepmill.observe.report import per_second
from stepmill.observe.tune_choice import Configuration, EnvProfile
from stepmill.spec.options import PoolOptions
from stepmill.spec.stats_text import duration_text


@dataclass(frozen=True)
class Trial:
    """One configuration, and its measured rate.

    Attributes:
        steps_per_s: env-steps per second including automatic resets, as the median of its turns; None if it was not measured.
        failure: why its envs failed; empty if they did not fail.
    """

    configuration: Configuration
    steps_per_s: float | None
    failure: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers, strings and dicts, which JSON can hold."""
        return {
            **self.configuration.keywords(),
            "batch_size": self.configuration.batch_size,
            "steps_per_s": self.steps_per_s,
            "failure": self.failure or None,
        }


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """How to run an env on this machine, and why.

    Attributes:
        env: the name of the env.
        num_envs: N.
        cores: the number of usable cores.
        learner_s: seconds that the program computes between two batches.
        profile: the costs of one env.
        choice: the configuration to use.
        baseline: the configuration that backend="auto" uses.
        gain: how many times as fast as the baseline the choice is, from turns of both in the same rounds; None if unknown.
        trials: all configurations that were measured, the fastest first.
        reasons: one for each part of the choice.
        notes: what could not be measured, and why.
        code: a program that makes the envs in this way.
        alternative, alternative_code: if the choice has a batch size, the best configuration for steps of all envs, and its program.
        elapsed_s: how long the search took.
        is_interrupted: whether it was ended early.
    """

    env: str
    num_envs: int
    cores: int
    learner_s: float
    profile: EnvProfile
    choice: Trial
    baseline: Trial
    gain: float | None
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    code: str
    alternative: Trial | None
    alternative_code: str | None
    elapsed_s: float
    is_interrupted: bool

    @property
    def keywords(self) -> dict[str, object]:
        """The keywords of `make_vec`, `VectorEnv` and `Pool` that give this configuration. A Pool also takes `batch_size`."""
        return self.choice.configuration.keywords()

    @property
    def options(self) -> PoolOptions:
        """The same configuration as PoolOptions."""
        return PoolOptions(**self.keywords)  # type: ignore[arg-type]  # fields of PoolOptions

    @property
    def batch_size(self) -> int | None:
        """The number of envs that `Pool.recv` waits for; None steps all envs together."""
        return self.choice.configuration.batch_size

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers, strings, lists and dicts, which JSON can hold."""
        document = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        document["interrupted"] = document.pop("is_interrupted")
        return document

    def __str__(self) -> str:
        profile = self.profile
        ending = ", interrupted" if self.is_interrupted else ""
        learner = f"a learner of {duration_text(self.learner_s)} per batch" if self.learner_s else "no learner"
        percentiles = f"p50 {duration_text(profile.step_p50_s)}, p99 {duration_text(profile.step_p99_s)}"
        length = profile.episode_steps
        episodes = "no episode ended" if math.isinf(length) else f"episodes of {length:.0f} steps"
        lines = [
            f"{self.env}, {self.num_envs} envs, {self.cores} usable cores, {learner}{ending}",
            f"  step     {duration_text(profile.step_s)} ({percentiles}); the env uses a core for {profile.cpu_share:.0%} of its time",
            f"  reset    {duration_text(profile.reset_s)}; {episodes}, observations of {profile.obs_bytes:,} bytes",
            f"  use {self.choice.configuration}",
            *(f"    {reason}" for reason in self.reasons),
            *(f"  note: {note}" for note in self.notes),
            *self._table(),
            f"  {self._gain_text()}",
            "",
            self.code,
        ]
        if self.alternative is not None and self.alternative_code is not None:
            lines += ["", f"# or, for steps of all envs: {self.alternative.configuration}", self.alternative_code]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        longest = max(len(str(each.configuration)) for each in self.trials)
        lines = [f"  {'measured by turns':<{longest + 4}} env-steps/s"]
        for each in self.trials:
            mark = "->" if each.configuration == self.choice.configuration else "  "
            measured = "failed" if each.failure else "-"
            if each.steps_per_s is not None and not each.failure:
                measured = per_second(each.steps_per_s)
            about = '  backend="auto"' * (each.configuration == self.baseline.configuration)
            lines.append(f"  {mark}  {each.configuration!s:<{longest}} {measured:>11}{about}")
        return lines

    def _gain_text(self) -> str:
        if self.choice.configuration == self.baseline.configuration:
            return 'gain     none: this is what backend="auto" does'
        return "gain     not measured" if self.gain is None else f'gain     {self.gain:.2f} times backend="auto"'


def _plain(value: object) -> object:
    """Return a field of a result as JSON can hold it."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, EnvProfile):
        return {name: None if number == math.inf else number for name, number in asdict(value).items()}
    return value.to_dict() if isinstance(value, Trial) else value


_PREPROCESSING = f"""
def preprocess(env):
    env = AtariPreprocessing(env, frame_skip={FRAME_SKIP}, screen_size={SCREEN_SIZE_PX}, grayscale_obs=True)
    return FrameStackObservation(env, {STACK_SIZE})

"""


def code_text(choice: EnvChoice, configuration: Configuration, num_envs: int) -> str:
    """Return a program of a few lines that makes the envs."""
    is_in_step = configuration.batch_size is None
    options = "".join(f", {name}={value!r}" for name, value in configuration.keywords().items()).replace("'", '"')
    options = options if is_in_step else f", batch_size={configuration.batch_size}{options}"
    count = f"({num_envs} + {configuration.spare_envs})" if configuration.spare_envs else str(num_envs)
    kwargs: dict[str, object] = {**dict(choice.env_kwargs), **({"frameskip": 1} if choice.is_atari else {})}
    arguments = "".join(f", {name}={value!r}" for name, value in kwargs.items())
    imports, body = ["import stepmill"], [""]
    if choice.is_atari:
        imports.insert(0, "from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation")
        body += _PREPROCESSING.split("\n")
    if choice.is_function:
        name = choice.env_id.rpartition(":")[2]
        make = name if name.isidentifier() else "make_env"
        imports += [f"from {choice.module} import {make}"] if choice.module else []
        make = f"lambda: {make}({arguments[2:]})" if arguments else make
    else:
        known_id = f"{choice.module}:{choice.env_id}" if choice.module else choice.env_id
        make = f'gymnasium.make("{known_id}", disable_env_checker=True{arguments})'
        make = f"lambda: preprocess({make})" if choice.is_atari else f"lambda: {make}"
    if not is_in_step:
        imports = imports if choice.is_function else ["import gymnasium", *imports]
        call = f"pool = stepmill.Pool([{make}] * {count}{options})"
    elif choice.is_function:
        call = f"envs = stepmill.VectorEnv([{make}] * {count}{options})"
    else:
        wrappers = (f", env_kwargs={kwargs!r}" if kwargs else "") + ", wrappers=[preprocess]" * choice.is_atari
        call = f'envs = stepmill.make_vec("{known_id}", num_envs={num_envs}{wrappers}{options})'
    return "\n".join([*imports, *body, call])
