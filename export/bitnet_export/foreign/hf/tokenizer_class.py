"""What the class of a tokenizer changes in the rules of its tokenizer.json, as in transformers.

Source: the tokenization files of transformers 5.23. Versions before replace the same rules by the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import Fields

SIGLIP, SIGLIP2 = "SiglipTokenizer", "Siglip2Tokenizer"
_WORDS, _BYTES = ("BertTokenizer", "DistilBertTokenizer"), ("GPT2Tokenizer", "RobertaTokenizer")
_OF_MODEL = {
    "bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "gpt2": "GPT2Tokenizer",
    "roberta": "RobertaTokenizer",
}  # fmt: skip
"""The class of a folder that names none, by its model_type."""


def apply_class(definition: dict[str, Any], config: Mapping[str, Any], model_type: object, what: str) -> list[str]:
    """Change a definition as its class does; a line on what it now does that its file does not say.

    config: tokenizer_config.json, `what` in messages. Raises SourceError for a value of another type.
    """
    named = config.get("tokenizer_class") or (_OF_MODEL.get(model_type) if isinstance(model_type, str) else None)
    named, fields = str(named).removesuffix("Fast"), Fields(config, what)
    normalizer, cut = definition["normalizer"], definition["pre_tokenizer"]
    if steps := _siglip(named, config):
        own = [normalizer] if normalizer else []
        definition["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *own]}
    elif named in _WORDS and normalizer and normalizer["type"] == "BertNormalizer":
        said = {
            "lowercase": fields.truth("do_lower_case", True),
            "handle_chinese_chars": fields.truth("tokenize_chinese_chars", True),
            "strip_accents": fields.truth("strip_accents") if "strip_accents" in fields else None,
        }
        definition["normalizer"] = normalizer | said
    elif named in _BYTES and cut and cut["type"] == "ByteLevel":
        said = {"add_prefix_space": fields.truth("add_prefix_space")}
        definition["pre_tokenizer"] = cut | said
    else:
        return []
    if steps or (definition["normalizer"], definition["pre_tokenizer"]) == (normalizer, cut):
        return []
    words = ", ".join(f"{name} {'unset' if value is None else str(value).lower()}" for name, value in said.items())
    return [f"the tokenizer has {words}, as {named} makes it; tokenizer.json alone says otherwise"]


def _siglip(named: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Steps before the normalization of tokenizer.json."""
    lower = {"type": "Lowercase"}
    if named == SIGLIP2:
        return [lower]
    if named != SIGLIP:
        return []
    replaced = (({"String": "▁"}, " "), ({"Regex": r"[!-/:-@\[-`{-~]"}, ""), ({"Regex": r"\s+"}, " "))
    steps = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in replaced]
    lowers = [lower] if config.get("do_lower_case", True) else []
    return [*lowers, *steps, {"type": "Strip", "strip_left": True, "strip_right": True}]
