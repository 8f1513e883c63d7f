"""Kinds of command line options that several commands have. Only this file and those of the commands import click."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import click

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
COUNT = click.IntRange(min=1)


class Finite(click.FloatRange):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Arguments(click.ParamType[dict[str, object]]):
    """Keyword arguments as a JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        try:
            found = json.loads(value)
        except ValueError as exc:
            self.fail(f"{value!r} is not JSON: {exc}.", param, ctx)
        if not isinstance(found, dict):
            self.fail(
                f"{value!r} is a JSON {type(found).__name__}; give an object, such as '{{\"gravity\": 9.8}}'.",
                param,
                ctx,
            )
        return found


SECONDS = Finite(min=0, min_open=True)


def choice_option(flag: str, values: Sequence[str], default: str, what: str) -> Decorator:
    """Declare an option that takes one of these values."""
    help_text = f"{what}: {', '.join(values)}."
    kind = click.Choice(values)
    return click.option(flag, metavar="NAME", type=kind, default=default, show_default=True, help=help_text)


BACKEND = choice_option("--backend", ("auto", "serial", "thread", "process"), "auto", "Where envs run")


def json_option(what: str) -> Decorator:
    """Declare the option --json of a command that prints a summary or a report."""
    return click.option(
        "--json", "is_json", is_flag=True, help=f"Print the {what} as JSON, and nothing else, on stdout."
    )


def limit_option(call: str, what: str) -> Decorator:
    """Declare the option of the time limit of a call, "step" or "reset", which is an option of the pool."""
    return click.option(f"--{call}-timeout", f"{call}_timeout_s", type=SECONDS, metavar="S", help=what)
