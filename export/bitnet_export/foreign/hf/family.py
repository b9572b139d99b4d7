"""The description of an architecture of `transformers`; `families.py` and `images.py` contain them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bitnet_export.foreign.source import SourceError

from . import configuration as its
from .fields import Fields
from .places import Name

QUANTIZATION = "quantization_config"  # in config.json, always at the top level
SOME_READ = (
    "hidden_activation", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "sliding_window_pattern", "norm_topk_prob",
)  # fmt: skip
"""Fields that the classes of some families read and those of others ignore, even if a folder has them."""


class Family(NamedTuple):
    """An architecture."""

    model_type: str
    fixed: Mapping[str, Any]  # fields of ModelConfig that config.json does not determine
    parts: tuple[its.Part, ...] = (its.turned, its.attention_biases)  # functions for the others
    defaults: Mapping[str, Any] = {}  # defaults of fields, as in transformers
    fields: Mapping[str, str] = {}  # its names of fields, if not Llama's
    reads: tuple[str, ...] = ()  # fields that have a meaning only here
    neutral: Mapping[str, tuple[Any, ...]] = {}  # fields that would change it, and their neutral values
    names: Mapping[str, Name | list[Name]] = {}  # names of modules by role, if not Llama's
    prefixes: tuple[str, ...] = ("model.",)  # of all modules but the head, by program; a bare backbone may have none
    layers: str = "layers."  # followed by the number of a layer
    head: bool = True  # False: a backbone, whose outputs are hidden states
    pooling: str = "last"  # of a backbone, if neither `fixed` nor its folder says it
    aside: str = ""  # a regular expression of tensors that are left out, with a note
    one_plus: bool = False  # norms multiply by 1 + weight
    transposed: bool = False  # linear layers are inputs × outputs
    masters: bool = False  # BitNet by definition: float weights are masters
    head_bias: bool = False  # the head has a bias if the folder has one
    pickled: bool = False  # the weights may be a file of torch.save
    padded: bool = False  # texts are padded to the greatest length, and padding is not masked
    similar: tuple[str, ...] = ()  # tensors of the similarity of image and text: log of the scale, bias
    pictures: Mapping[str, Any] = {}  # defaults of preprocessor_config.json, as in transformers
    what: str = "Hugging Face folder"
    part: tuple[
        str, ...
    ] = ()  # objects of config.json that may describe it, of which the first present counts; (): the whole
    part_type: str = ""  # the model_type of that object
    shared: tuple[str, ...] = ()  # top-level fields that apply to it, besides QUANTIZATION
    vision: Family | None = None  # its vision stack
    others: Mapping[str, Family] = {}  # the same architecture with other kinds of the part, by model_type

    def described(self, values: Mapping[str, Any], what: str) -> Fields:
        """The fields that describe it. values: of config.json. Raises SourceError if they are missing."""
        whole, name = Fields(values, what), next((name for name in self.part if values.get(name) is not None), "")
        if self.part and not name:
            raise SourceError(f"{what} has no {self.part[-1]}, which describes a stack of it; download it again")
        part = whole.object(name) if name else values
        fields = {**(part or {}), **{each: whole[each] for each in (*self.shared, QUANTIZATION) if each in whole}}
        fields = {each: value for each, value in fields.items() if each not in SOME_READ or each in self.reads}
        what = f"{what}: {name}" if name else what
        return Fields(fields, what, theirs=self.fields, defaults=self.defaults)

    def of_part(self, values: Mapping[str, Any], what: str) -> Family:
        """The family for the kind of the part in this configuration."""
        if not self.part:
            return self
        kinds, found = {self.part_type: self, **self.others}, self.described(values, what)
        kind = found.get("model_type", self.part_type)
        if not isinstance(kind, str) or kind not in kinds:
            raise SourceError(f"{found.what}: model_type is {kind!r:.40}, expected {' or '.join(kinds)}")
        return kinds[kind]
