"""`bitnet finetune`: the model that a run starts from, instead of random weights.

Facts and figures: docs/finetune.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.model.layers import RMSNorm
from bitnet.model.transformer import Transformer
from bitnet.settings import TEXT
from bitnet.source_settings import of_source
from bitnet.train.checkpoint import CONFIG, Checkpoint, CheckpointError, all_of, read_json

FOREIGN = {"architectures", "model_type", "d_model"}  # keys of transformers, and of a Thinker
TABLES = ("embedding.weight", "head.weight", "head.bias")


class SourceModelError(ValueError):
    """Source, options and data of a finetuning run do not fit together."""


Writes = Callable[[Sequence[list[int]], int, int], Iterator[list[int]]]
"""Of prompts, at most so many tokens more, and a seed: each prompt with what the model writes behind it."""


@dataclass(frozen=True)
class Start:
    """A model to start from, in our terms; `config.ternary` is empty for a full-precision one."""

    what: str  # one line
    config: ModelConfig
    weights: Mapping[str, Tensor]  # fp32 by parameter name
    tokenizer: Tokenizer | None  # None: it has none, an error only if it has to read text
    template: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()  # a line each
    writer: Callable[[], AbstractContextManager[Writes]] | None = None  # None: the engine cannot run it
    text: dict[str, Any] = field(default_factory=dict)  # settings that name its training data; empty: unknown
    objective: str = "next"  # the objective it was trained with
    step: str = ""  # the name of the checkpoint

    def defaults(
        self, draft_only: bool = False, lora: bool = False, preference: bool = False, *, objective: str = ""
    ) -> tuple[dict[str, Any], ModelConfig]:
        """Settings and model of a run, before the user's own. Raises SourceModelError if the model has no tokenizer.

        draft_only, lora, preference: whether the run trains only a draft, adapters, or on preferences.
        objective: the run's, "": that of the source. With another one the run does not inherit the source's text.
        """
        assert self.words
        settings, config = of_source(self.config, draft_only, lora, preference)
        text = self.text if objective in ("", self.objective) else {}
        return {"objective": self.objective} | text | settings, config

    @property
    def digest(self) -> str:
        """Of the configuration and the weights."""
        found = hashlib.sha256(self.config.to_json().encode())
        for name, tensor in sorted(self.weights.items()):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()[:16]

    @property
    def words(self) -> Tokenizer:
        if self.tokenizer is None and self.config.input == "tokens":
            raise SourceModelError(
                f"{self.what}: it has no tokenizer.json and no tokenizer.model; copy that of the model there"
            )
        if self.tokenizer is None:
            raise SourceModelError(
                f"{self.what}: it sees images and reads no text, so there is nothing to learn with it alone; give it "
                "to a run with --vision, or as --teacher with --distill-features"
            )
        return self.tokenizer

    @property
    def sight(self) -> ModelConfig | None:
        """The configuration of the vision stack."""
        return self.config if self.config.input == "images" else self.config.vision

    @property
    def sees_in_floats(self) -> bool:
        """Whether that stack is full-precision."""
        return self.sight is not None and not self.sight.ternary


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is ours: a run folder, or a checkpoint whose configuration is not another program's."""
    folder = Path(path)
    if not folder.exists() or all_of(folder):
        return True
    try:
        return not FOREIGN & read_json(folder / CONFIG).keys()
    except CheckpointError:
        return False


def read_checkpoint(path: str | Path) -> Start:
    """One of our own checkpoints, or the newest one of a run folder."""
    checkpoint = Checkpoint.open(path)
    text, objective = _text_of(checkpoint.state_if_any.get("settings"))
    return Start(
        what=f"checkpoint {checkpoint.folder}",
        step=checkpoint.folder.name.removesuffix(".fallen"),
        config=checkpoint.config,
        weights=checkpoint.model.state_dict(),
        tokenizer=checkpoint.words,
        template=checkpoint.template,
        generation=checkpoint.generation,
        text=text,
        objective=objective,
    )


def _text_of(settings: Any) -> tuple[dict[str, Any], str]:
    """The settings of a run that name its training data, and its objective; no data if it learnt from preferences."""
    if not isinstance(settings, dict) or settings.get("preference"):
        return {}, "next"
    return {name: settings[name] for name in TEXT if name in settings}, str(settings.get("objective", "next"))


def build(start: Start, config: ModelConfig) -> tuple[Transformer, list[str]]:
    """The model of `config` with the weights of `start`, and the names of norms that `start` did not have.

    Rows of tokens added to the vocabulary are the mean of the others: a random row would be an
    outlier, and outliers cost resolution of the int8 activations.
    Raises SourceModelError naming the tensor that does not fit.
    """
    model = Transformer(config)
    wanted, weights = model.state_dict(), dict(start.weights)
    for name in TABLES:
        if name in wanted and name in weights and len(weights[name]) < len(wanted[name]):
            table = weights[name]
            added = table.mean(0, keepdim=True).expand(len(wanted[name]) - len(table), *table.shape[1:])
            weights[name] = torch.cat([table, added])
    new = [] if start.config.vision else ["vision.", "similarity."]  # a source without vision may get it
    new += [] if start.config.draft else ["draft."]
    if not config.draft:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("draft.")}
    weights |= {name: wanted[name] for name in wanted if name not in weights and name.startswith((*new, "similarity."))}
    weights |= {name: wanted[name] for name in wanted if name not in weights and ".adapter_" in name}
    inserted = [name for name in wanted if name not in weights and name.endswith("_norm.weight")]
    weights |= {name: wanted[name] for name in inserted}
    for name in sorted(wanted.keys() | weights.keys()):
        shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (weights, wanted)]
        if shapes[0] != shapes[1]:
            raise SourceModelError(
                f"tensor {name} is {shapes[0]} in the source and {shapes[1]} in the model asked for; "
                "--set can change how weights are used, not which there are (norms can be added)"
            )
    model.load_state_dict(weights)
    return model, inserted


def take_vision(model: Transformer, tower: Start) -> str:
    """Copy the weights of another model's vision stack into a model, except tensors that the model does not have, and a
    projector to another width. Returns a line about it. Raises SourceModelError."""
    sees, own = tower.config.input == "images", model.vision
    theirs = {name.removeprefix("" if sees else "vision."): tensor for name, tensor in tower.weights.items()
              if sees or name.startswith("vision.")}  # fmt: skip
    if own is None or not theirs:
        raise SourceModelError(f"{tower.what} has no vision stack to begin with; give --vision one that has")
    wanted = own.state_dict()
    for name, tensor in wanted.items():
        given = theirs.get(name)
        if given is not None and given.shape == tensor.shape:
            tensor.copy_(given)
        elif not name.startswith("projector."):
            found = "missing" if given is None else list(given.shape)
            raise SourceModelError(
                f"{tower.what}: tensor {name} of its vision stack is {found}, in the model {list(tensor.shape)}; "
                "leave out the --set vision.… that gives it another shape, or train without --vision"
            )
    return f"images: {tower.what}"


def calibrate(model: Transformer, inserted: list[str], inputs: Tensor, *told: Tensor) -> None:
    """Set the gain of each inserted norm to the mean RMS of its inputs, so that it changes least.

    (With a gain of 1 the model starts as if its weights were random: arXiv 2510.13998 reproduced.)
    One pass of the float model over `inputs`, in which each norm is set before the next is reached.
    """

    def measure(norm: RMSNorm, args: tuple[Tensor, ...]) -> None:
        if not args[0].numel():  # an expert that no token chose
            return
        norm.weight.fill_(args[0].float().square().mean(-1).sqrt().mean().clamp(min=norm.eps))

    norms = [model.get_submodule(name.removesuffix(".weight")) for name in inserted]
    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        with torch.no_grad(), model.evaluating(), model.partly_quantized(0.0):
            model(inputs, *told)
    finally:
        for handle in handles:
            handle.remove()
