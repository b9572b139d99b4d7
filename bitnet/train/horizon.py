"""The length of a run: a budget of steps, tokens, tokens per parameter, or minutes; and the place of the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from bitnet.settings import Settings
from bitnet.train import schedule
from bitnet.train.schedule import Place
from bitnet.train.state import State

JUMP = 0.1
"""Increase of λ in one step above which the run says so."""


@dataclass(frozen=True)
class Horizon:
    """The end of a run, in seconds if the budget is in minutes, otherwise in tokens."""

    tokens: int  # tokens of the whole run; 0: seconds count
    seconds: float
    each: int  # tokens of a step

    @classmethod
    def of(cls, settings: Settings, state: State, each: int) -> Self:
        """The horizon of a run in this state, with `each` tokens per step from here on."""
        if settings.minutes:
            return cls(0, 60 * settings.minutes, each)
        wanted = settings.tokens or settings.tokens_per_parameter * state["parameters"]
        left = math.ceil((wanted - state["tokens"]) / each) if wanted else settings.steps - state["step"]
        return cls(state["tokens"] + max(0, left) * each, 0.0, each)

    def steps(self, state: State) -> int:
        """Steps of the whole run; with a budget in seconds, at the speed so far."""
        made = state["step"]
        if self.seconds:
            return max(made, round(made / max(self.progress(state), 1e-9)))
        return made + math.ceil((self.tokens - state["tokens"]) / self.each)

    def progress(self, state: State) -> float:
        """Share of the budget at the middle of the next step, or by the clock; below 1 while the budget lasts."""
        if self.seconds:
            return state["seconds"] / self.seconds
        return (state["tokens"] + self.each / 2) / max(1, self.tokens)

    def place(self, state: State) -> Place:
        """The place of the next step. `state` of the run has "planned", its first horizon, and "resumed", where it got
        this one."""
        whole = self.progress(state)
        unit, size = ("seconds", self.seconds) if self.seconds else ("tokens", max(1, self.tokens))
        tokens = state["tokens"] if self.seconds else state["tokens"] + self.each / 2
        return Place(
            whole=whole,
            begun=whole * max(1.0, size / (state["planned"].get(unit) or size)),
            tokens=tokens,
            horizon=self.tokens or tokens / max(whole, 1e-9),
            since=min(1.0, state["resumed"][unit] / size),
            fallen=state["resumed"]["fall"],
            quantized=state["quantized"],
        )


def begin(settings: Settings, state: State, each: int, before: State | None) -> tuple[Horizon, str]:
    """The horizon of a run, recorded in `state`, and a note for the user. before: the state it resumes from."""
    notes: list[str] = []
    found = Horizon.of(settings, state, each)
    _plan_in_unit_of(found, state)
    if before and _end(settings, before) != _end(Settings.from_dict(before["settings"]), before):
        state["resumed"] = {"tokens": state["tokens"], "seconds": state["seconds"], "fall": state["fall"]}
        if state["fall"] == 1:
            state["stable"] = None
        elif schedule.fall(settings, found.place(state)) > state["fall"]:
            notes.append(
                f"the learning rate had fallen to {state['fall']:.1%}, and there is no checkpoint from before that: "
                "it rises again, as in --warmup"
            )
    if before and (amount := schedule.quantization(settings, found.place(state))) > state["quantized"] + JUMP:
        notes.append(
            f"λ goes from {state['quantized']:.2g} to {amount:.2g} in one step, and the loss with it: the run is "
            "shorter than planned, or to be ternary sooner"
        )
    if 0 < found.tokens < settings.quantize_warmup:
        amount = found.tokens / settings.quantize_warmup
        notes.append(
            f"the run ends before its weights are ternary: after {found.tokens:,} tokens λ is {amount:.2g}, with "
            f"--quantize-warmup {settings.quantize_warmup:,.0f} it is 1"
        )
    if not before and (told := _never_risen(settings, found.tokens)):
        notes.append(told)
    state["planned"] = state["planned"] or {"tokens": found.tokens, "seconds": found.seconds}
    return found, "; ".join(notes)


def _plan_in_unit_of(found: Horizon, state: State) -> None:
    """The planned length in the unit of a budget that replaces one in the other, at the speed so far: otherwise the
    warm-up would begin again."""
    unit, other = ("seconds", "tokens") if found.seconds else ("tokens", "seconds")
    planned, made = state["planned"], {"tokens": state["tokens"], "seconds": state["seconds"]}
    if planned.get(other) and not planned.get(unit) and made[other]:
        state["planned"] = {**planned, unit: planned[other] * made[unit] / made[other]}


def _never_risen(settings: Settings, tokens: int) -> str:
    """The note for a warm-up or warm-down, given in tokens, that is too long for the run; "" if neither is. (Shares are
    checked earlier. 0 tokens: seconds count.)"""
    lengths = settings.warmup, settings.warmdown if settings.schedule == "constant" else 0.0
    rise, fall = (length if length > 1 else length * tokens for length in lengths)
    if max(lengths) <= 1 or not 0 < tokens < rise + fall:
        return ""
    return (
        f"the learning rate does not reach {settings.lr:g}: it rises for {rise:,.0f} tokens and falls for {fall:,.0f}, "
        f"and the run has {tokens:,}; lower --warmup or --warmdown"
    )


def longer(settings: Settings, state: State) -> bool:
    """Whether a run that continues from this state would be longer than it was planned to be."""
    return _tokens(settings, state) > _tokens(Settings.from_dict(state["settings"]), state)


def _end(settings: Settings, state: State) -> tuple[Any, ...]:
    """The values that determine where the run ends; for a budget in steps also their size."""
    return *settings.budget, _of_step(settings, state) if settings.budget[0] == "steps" else 0


def _of_step(settings: Settings, state: State) -> int:
    """Tokens of a step, or a number proportional to them."""
    context = settings.context or state["model"]["max_context"]
    return settings.batch_tokens or settings.batch * settings.accumulate * context


def _tokens(settings: Settings, state: State) -> float:
    """Tokens of the whole run, if the rest goes on as so far."""
    name, wanted = settings.budget
    done = {
        "steps": state["step"],
        "minutes": state["seconds"] / 60,
        "tokens": state["tokens"],
        "tokens_per_parameter": state["tokens"] / state["parameters"],
    }[name]
    if not done:
        return math.inf
    times = _of_step(settings, state) / _of_step(Settings.from_dict(state["settings"]), state) if name == "steps" else 1
    return state["tokens"] * (1 + times * (wanted / done - 1))
