"""What there is to say of an architecture of `transformers`; `families.py` and `images.py` say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bitnet_export.foreign.source import SourceError

from . import configuration as its
from .fields import Fields
from .places import Name

QUANTIZATION = "quantization_config"  # of config.json; always of the whole
SOME_READ = (
    "hidden_activation", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "sliding_window_pattern", "norm_topk_prob",
)  # fmt: skip
"""Fields that the classes of some families read and those of others pass over, though a folder has them."""


class Family(NamedTuple):
    """An architecture."""

    model_type: str
    fixed: Mapping[str, Any]  # of ModelConfig: what config.json has no say in
    parts: tuple[its.Part, ...] = (its.turned, its.attention_biases)  # what it has a say in
    defaults: Mapping[str, Any] = {}  # what fields are that it does not have, as transformers has it
    fields: Mapping[str, str] = {}  # what it calls fields, where that is not what Llama does
    reads: tuple[str, ...] = ()  # fields with a meaning that others do not have
    neutral: Mapping[str, tuple[Any, ...]] = {}  # fields that would change it, and the values that do not
    names: Mapping[str, Name | list[Name]] = {}  # of modules by role, where they are not those of Llama
    prefixes: tuple[str, ...] = ("model.",)  # of all modules but the head, by program; a backbone alone may have none
    layers: str = "layers."  # and then the number of a layer
    head: bool = True  # False: a backbone, whose result is the states of the tokens
    pooling: str = "last"  # of a backbone, where neither `fixed` nor its folder says it
    aside: str = ""  # a regular expression of tensors that are left out, and are said to be
    one_plus: bool = False  # norms multiply with 1 + weight
    transposed: bool = False  # linear layers are inputs × outputs
    masters: bool = False  # BitNet by definition: float weights are there to be quantized
    head_bias: bool = False  # the head has a bias where the folder has one
    pickled: bool = False  # the weights may be a file of torch.save
    padded: bool = False  # texts are filled up to their greatest length, and what fills them is attended to
    similar: tuple[str, ...] = ()  # tensors of how alike an image and a text are: log of the scale, bias
    pictures: Mapping[str, Any] = {}  # fields of preprocessor_config.json that it need not have, as transformers has it
    what: str = "Hugging Face folder"
    part: tuple[
        str, ...
    ] = ()  # the objects of config.json that may describe it, the first that is there; (): the whole
    part_type: str = ""  # the model_type of that
    shared: tuple[str, ...] = ()  # fields of the whole that count for it, beside QUANTIZATION
    vision: Family | None = None  # the stack that looks at images for this one
    others: Mapping[str, Family] = {}  # the same architecture with another kind of part, by its model_type

    def described(self, values: Mapping[str, Any], what: str) -> Fields:
        """The fields that describe it. values: of config.json. Raises SourceError: they are not there."""
        whole, name = Fields(values, what), next((name for name in self.part if values.get(name) is not None), "")
        if self.part and not name:
            raise SourceError(f"{what} has no {self.part[-1]}, which describes a stack of it; download it again")
        part = whole.object(name) if name else values
        fields = {**(part or {}), **{each: whole[each] for each in (*self.shared, QUANTIZATION) if each in whole}}
        fields = {each: value for each, value in fields.items() if each not in SOME_READ or each in self.reads}
        what = f"{what}: {name}" if name else what
        return Fields(fields, what, theirs=self.fields, defaults=self.defaults)

    def of_part(self, values: Mapping[str, Any], what: str) -> Family:
        """The row for the kind of part that a configuration of several has."""
        if not self.part:
            return self
        kinds, found = {self.part_type: self, **self.others}, self.described(values, what)
        kind = found.get("model_type", self.part_type)
        if not isinstance(kind, str) or kind not in kinds:
            raise SourceError(f"{found.what}: model_type is {kind!r:.40}, expected {' or '.join(kinds)}")
        return kinds[kind]
