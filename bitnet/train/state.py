"""What a checkpoint records of a run besides model and optimizer: `state.json`."""

from __future__ import annotations

from typing import Any, TypedDict, cast


class Best(TypedDict):
    """The best evaluation."""

    step: int  # 0: there was none yet
    loss: float
    since: int  # evaluations since
    told: bool  # whether the user was told about overfitting


class BestTasks(TypedDict):
    """The best mean score of tasks."""

    step: int | None
    score: float


class Recorded(TypedDict, total=False):
    """The data files of a run, by kind and side, to find them again."""

    texts: dict[str, Any]
    pairs: bool  # whether the text was given in pairs
    mixture: dict[str, Any]
    pictures: dict[str, Any]
    reference: dict[str, str]  # log-probabilities before training


class State(Recorded):
    """The state of a run. An earlier version's may lack keys: a resumed run begins with those of `beginning`."""

    step: int
    tokens: int
    seconds: float
    evaluated: float  # of these the seconds that evaluations took, of the slowest process
    recent: list[float]  # losses of the last good steps
    skipped: int  # bad steps since
    planned: dict[str, float]  # the first horizon: tokens, seconds
    resumed: dict[str, float]  # where the run got its present horizon: tokens, seconds, fall
    fall: float  # factor of the learning rate in the newest step
    stable: int | None  # the last step before the learning rate began to fall
    quantized: float  # λ
    phased: bool  # whether λ also applies to the vision stack, which is otherwise fully quantized
    course: list[dict[str, Any]]  # of a mixture: the steps at which its weights changed, and the new ones
    sizes: dict[str, float]  # running means of the loss's terms, where they are balanced
    best: Best
    best_tasks: BestTasks
    parameters: int  # that are learned, without a draft
    data: str  # digest of what is read
    held_out: str
    teacher: str  # its checkpoint, to find it again on resume
    settings: dict[str, Any]
    model: dict[str, Any]
    vocab_size: int  # as asked for; a tokenizer may have found fewer


NEEDED = "parameters", "planned", "resumed", "fall", "stable", "quantized"
"""Keys without which a run cannot be resumed."""
BEST: Best = {"step": 0, "loss": 0.0, "since": 0, "told": False}
BEST_TASKS: BestTasks = {"step": None, "score": 0.0}


def beginning(
    settings: dict[str, Any], model: dict[str, Any], parameters: int, data: str = "", held_out: str = ""
) -> State:
    """The state before the first step."""
    return {
        "step": 0, "tokens": 0, "seconds": 0.0, "evaluated": 0.0, "recent": [], "skipped": 0, "planned": {},
        "resumed": {"tokens": 0, "seconds": 0.0, "fall": 1.0}, "fall": 1.0, "stable": None, "quantized": 0.0,
        "phased": True, "course": [], "sizes": {}, "best": {**BEST}, "best_tasks": {**BEST_TASKS},
        "parameters": parameters, "data": data, "held_out": held_out, "teacher": "", "settings": settings,
        "model": model, "vocab_size": model["vocab_size"],
    }  # fmt: skip


def resumed(first: State, before: State) -> State:
    """The state of a run that goes on. first: what it would begin with now; before: the recorded one."""
    old = State.__required_keys__ - {"settings", "model"}
    return {**first, **cast(State, {name: value for name, value in before.items() if name in old})}
