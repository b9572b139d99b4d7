"""A Hugging Face folder as a Source: config.json, weights, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.source import Source, SourceError, Tensor
from bitnet_export.packed.records import Key

from .families import family_of
from .family import QUANTIZATION, Family
from .fields import Fields
from .folder import Folder
from .known import refuse
from .pickled import open_checkpoint, open_pickled
from .settings import read_padding, read_texts
from .shards import INDEX, PICKLED, PICKLED_INDEX, SINGLE, Entry, open_shards
from .stack import Stack, open_stack
from .tokenizer import tokenizer_of
from .weights import SKIPPED


@contextmanager
def open_folder(path: Path, *, floats: bool = False) -> Iterator[Source]:
    """Open a model folder; shapes and names of all tensors are checked now, their values when they are loaded.

    floats: for training. All matrices are read as floats, `config.ternary` names those that the model quantizes
    (none in a full-precision model), and weights that are already ternary are refused.
    Raises SourceError naming what was found and what was expected, or an OSError.
    """
    folder = Folder(path)
    values = folder.json("config.json")
    weights = next(filter(folder.find, (SINGLE, INDEX, PICKLED, PICKLED_INDEX)), None)
    adapter = folder.find("adapter_config.json")
    if adapter and not (values and weights):
        raise SourceError(
            f"{path} is an adapter of PEFT, expected a whole model; merge_and_unload puts it into one of floats, and "
            "save_pretrained writes that. Adapters of ternary models are made by `bitnet finetune --lora`"
        )
    if not (values and weights) and not floats and (others := sorted(path.glob("*.gguf"))):
        rest = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise SourceError(
            f"{path} holds {others[0].name}{rest}, expected a Hugging Face folder; "
            f"`bitnet convert {shlex.quote(str(others[0]))} OUT` reads that file"
        )
    if not values:
        found = "an empty config.json" if folder.find("config.json") else "no config.json"
        raise SourceError(f"{path} has {found}; expected a Hugging Face folder")
    what = str(path / "config.json")
    architecture, family = family_of(values, what)
    families = [family, *([family.vision.of_part(values, what)] if family.vision else [])]
    assumptions = _refuse_whole(values, families, what)
    tensors, more = _tensors(folder, family)
    stacks = [open_stack(folder, each, values, tensors, floats=floats) for each in families]
    model = _joined([stack.config for stack in stacks], what)
    assumptions += more + [line for stack in stacks for line in stack.assumptions]
    if adapter:
        assumptions.append(f"the adapter of adapter_config.json is left out, the model is that of {weights} alone")
    assumptions += _left_out(tensors, stacks, family, str(path))
    tokenizer, template, generation, more = _texts(folder, family, model, values)
    if pictures := next((stack.pictures for stack in stacks if stack.pictures), None):
        generation["pictures"] = dict(pictures)

    def load(key: Key) -> Tensor:
        return stacks[key.stack].weights.load(key)

    yield Source(
        what=f"{family.what}, {architecture}, {stacks[0].found}",
        config=model,
        load=load,
        assumptions=tuple(dict.fromkeys(assumptions + more)),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        generation=generation,
        provenance={"source": path.resolve().name, "architecture": architecture},
    )


def _tensors(folder: Folder, family: Family) -> tuple[dict[str, Entry], list[str]]:
    """All tensors, and assumptions."""
    if family.pickled and not folder.find(SINGLE):
        return open_checkpoint(folder)
    if not (folder.find(SINGLE) or folder.find(INDEX)) and (folder.find(PICKLED) or folder.find(PICKLED_INDEX)):
        return open_pickled(folder), []
    return open_shards(folder), []


def _refuse_whole(values: Mapping[str, Any], families: Sequence[Family], what: str) -> list[str]:
    """Like `refuse`, for the top-level fields of a configuration of several stacks."""
    if not families[0].part:
        return []
    theirs = {name for family in families for name in (*family.part, *family.shared, QUANTIZATION)}
    rest = Fields({name: value for name, value in values.items() if name not in theirs}, what)
    return refuse(rest, (), {})


def _joined(configs: Sequence[ModelConfig], what: str) -> ModelConfig:
    """The configuration of all stacks. Raises SourceError if they do not fit together."""
    try:
        return ModelConfig.of_stacks(configs)
    except ValueError as error:
        raise SourceError(f"{what}: {error}") from None


def _left_out(tensors: Mapping[str, Entry], stacks: Sequence[Stack], family: Family, what: str) -> list[str]:
    """A note on omitted tensors. Raises SourceError for a tensor that nothing requires."""
    used = {name for stack in stacks for name in stack.used}
    extra = [name for name in tensors if name not in used and not SKIPPED.fullmatch(name)]
    left = [name for name in extra if family.aside and re.fullmatch(family.aside, name)]
    if len(left) < len(extra):
        raise SourceError(f"{what}: tensor {min(set(extra) - set(left))} is there, config.json does not call for it")
    words = f"{len(left)} tensors of heads are left out, such as {min(left, default='')}: the encoder alone is taken"
    return [words] if left else []


def _texts(
    folder: Folder, family: Family, model: ModelConfig, values: Mapping[str, Any]
) -> tuple[bytes | None, str | None, dict[str, Any], list[str]]:
    """Tokenizer, template, generation defaults, and assumptions."""
    if model.input != "tokens":
        return None, None, {}, []
    tokenizer, template, generation, assumptions = tokenizer_of(folder, model.vocab_size)
    config = family.described(values, str(folder.path / "config.json"))
    end = config.get("eos_token_id")
    legacy = end == 2 and not model.has_head  # meaningless in old CLIP: there the largest token is meant
    if "eos_token_ids" not in generation and type(end) is int and 0 <= end < model.vocab_size and not legacy:
        generation["eos_token_ids"] = [end]
    if tokenizer is not None and not model.has_head and family.pooling:
        tokenizer, more = read_texts(folder, tokenizer, model.max_context)
        assumptions += more
    if family.padded:
        assumptions += read_padding(folder, config, tokenizer, generation)
    return tokenizer, template, generation, assumptions
