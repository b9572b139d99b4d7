"""The tokenizer of a Hugging Face folder, as transformers assembles it, with template and generation defaults.

tokenizer.json is the tokenizer, and says what goes around a text. tokenizer_config.json adds tokens,
interpreted as in transformers 5 (tokenization_utils_tokenizers.py), with one exception: for
`LlamaTokenizer` transformers replaces the rules of tokenizer.json by its own, which lose a space at
the start of a text. A folder with only a SentencePiece tokenizer.model gets SentencePiece's rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import (
    CONTROL,
    Vocabulary,
    around,
    load,
    note_others,
    sentencepiece_bpe,
    whole_template,
)
from bitnet_export.packed.records import MAX_TEMPLATE
from bitnet_runtime.tokenizer.edges import edges_of

from .folder import MAX_SENTENCEPIECE, MAX_TOKENIZER, Folder
from .generation import read_generation
from .sentencepiece import read_sentencepiece
from .tokenizer_class import apply_class

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_OF_MODEL = (_EXTRA, "model_specific_special_tokens")  # as objects: tokens by name
_MAX_ADDED = 1 << 16
_VOCABULARIES = ("vocab.json", "vocab.txt", "qwen.tiktoken", "tekken.json", "spiece.model", "sentencepiece.bpe.model")


def tokenizer_of(folder: Folder, vocab_size: int) -> tuple[bytes | None, str | None, dict[str, Any], list[str]]:
    """Definition of the tokenizer, chat template, generation defaults, and assumptions.

    vocab_size: rows of the model's embedding; an id beyond them is also a SourceError.
    Raises SourceError naming a file that is damaged, or of a kind that could only be run approximately.
    """
    assumptions: list[str] = []
    config = folder.json("tokenizer_config.json")
    tokenizer = _tokenizer(folder, config, assumptions)
    if tokenizer is None:
        assumptions.append("no tokenizer in the folder: text cannot be used, token ids can")
        return None, None, read_generation(folder, vocab_size, None, {}, assumptions), assumptions
    tokenizer.no_padding()
    tokenizer.no_truncation()
    given = _given(folder, config)
    named = _named(folder, config, given)
    _add_tokens(tokenizer, folder, given, named)
    definition = json.loads(tokenizer.to_str())
    as_written = dict(definition)
    model_type = folder.json("config.json").get("model_type")
    assumptions += apply_class(definition, config, model_type, f"{folder.path}/tokenizer_config.json")
    if definition != as_written:
        tokenizer = load(json.dumps(definition).encode(), "the tokenizer as its class has it")
    edges = {role: _edge(tokenizer, config, named, role) for role in ("bos", "eos") if f"add_{role}_token" in config}
    if folder.find("tokenizer.json"):
        assumptions += _said_otherwise(tokenizer, config, edges)
    elif edges:
        edges = {"bos": _edge(tokenizer, {"add_bos_token": True} | config, named, "bos")} | edges
        definition["post_processor"] = around(edges["bos"], edges.get("eos"))
        tokenizer = load(json.dumps(definition).encode(), "the tokenizer with its start and end tokens")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise SourceError(
            f"{folder.path}: the tokenizer has token id {largest}, config.json has vocab_size {vocab_size}; "
            "use the tokenizer of this model"
        )
    template = _template(folder, config, assumptions)
    if template and config.get("split_special_tokens"):
        assumptions.append(
            "special tokens of the chat template stay whole, which split_special_tokens would split; in texts they are "
            "always split"
        )
    texts = {name: _text(value) for name, value in named.items() if name.endswith("_token")}
    generation = read_generation(folder, vocab_size, tokenizer, texts, assumptions, template or "")
    return tokenizer.to_str().encode(), template, generation, assumptions


def _tokenizer(folder: Folder, config: Mapping[str, Any], assumptions: list[str]) -> Tokenizer | None:
    """The tokenizer of tokenizer.json or tokenizer.model."""
    content = folder.read("tokenizer.json", MAX_TOKENIZER)
    if content is not None:
        return load(content, str(folder.path / "tokenizer.json"))
    content = folder.read("tokenizer.model", MAX_SENTENCEPIECE)
    if content is None:
        if found := next(filter(folder.find, _VOCABULARIES), None):
            raise SourceError(f"{folder.path} has {found} but no tokenizer.json; save_pretrained writes one")
        return None
    model = read_sentencepiece(content, str(folder.path / "tokenizer.model"))
    if "add_bos_token" not in config:
        assumptions.append("tokenizer_config.json does not say add_bos_token: a text begins with the start token")
    before = model.bos if model.bos >= 0 and config.get("add_bos_token", True) is True else None
    kinds = list(model.kinds)
    if before is not None:
        kinds[before] = CONTROL
    legacy = config.get("legacy") is not False
    if model.prefix:
        follows = "begins with a space too" if legacy else "does not"
        assumptions.append(f"a text begins with a space, what follows a special token {follows} (`legacy`)")
    words = Vocabulary(model.tokens, kinds, before, None)
    return load(sentencepiece_bpe(words, model.scores, prefix=model.prefix, legacy=legacy), "tokenizer.model")


# ---- added and special tokens ----


def _given(folder: Folder, config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, with the special_tokens_map.json of older folders, as transformers joins them."""
    given = dict(config)
    if _OLD_EXTRA in given and not given.get(_EXTRA):
        given[_EXTRA] = given.pop(_OLD_EXTRA)
    said = {} if "added_tokens_decoder" in config else folder.json("special_tokens_map.json")
    both = [each for each in (given.get(_EXTRA), said.get(_EXTRA)) if isinstance(each, list)]
    given |= {name: value for name, value in said.items() if value}
    return given | ({_EXTRA: [token for each in both for token in each]} if both else {})


def _named(folder: Folder, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token and the like, and those of this model alone, in the order in which transformers adds them.

    Each is a text, or an object with its content and matching rules.
    """
    named = {name: given[name] for name in _NAMED if given.get(name)}
    of_model = [each if isinstance(each := config.get(key), dict) else {} for key in _OF_MODEL]
    named |= of_model[0]
    named |= {name: value for name, value in given.items() if name.endswith("_token") and _text(value)}
    named |= of_model[1]
    for name, value in named.items():
        if not _text(value):
            raise SourceError(f"{folder.path}: {name} is {value!r:.80}, expected a text or an object with a content")
    return named


def _add_tokens(tokenizer: Tokenizer, folder: Folder, given: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer.json lacks. Raises SourceError if their ids would differ from the declared ones."""
    declared = given.get("added_tokens_decoder")
    lists = [each if isinstance(each := given.get(key), list) else [] for key in (_EXTRA, _OLD_EXTRA)]
    if declared is None:
        texts = {_text(value) for value in (*named.values(), *lists[0])}
        declared = {
            str(token): {"content": text, "special": text in texts}
            for text, token in folder.json("added_tokens.json").items()
        }
    if not isinstance(declared, dict) or len(declared) > _MAX_ADDED:
        raise SourceError(f"{folder.path}: added_tokens_decoder is not an object of at most {_MAX_ADDED} tokens")
    ids: dict[str, int] = {}
    tokens = []
    for key, value in sorted(declared.items(), key=lambda item: (len(item[0]), item[0])):
        if not key.isdecimal() or not isinstance(value, dict) or not _text(value):
            raise SourceError(f"{folder.path}: added_tokens_decoder has {key!r:.20}: {value!r:.80}, expected a token")
        ids[_text(value)] = int(key)
        tokens.append(_added(value))
    known = set(ids) | {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    more = [*named.values(), *(lists[0] or lists[1])]
    if len(more) > _MAX_ADDED:
        raise SourceError(
            f"{folder.path}: tokenizer_config.json adds {len(more)} tokens, expected at most {_MAX_ADDED}"
        )
    for value in more:
        if _text(value) and _text(value) not in known:
            known.add(_text(value))
            tokens.append(_added(value if isinstance(value, dict) else {"content": value}, special=True))
    tokenizer.add_tokens(tokens)
    for text, token in ids.items():
        if tokenizer.token_to_id(text) != token:
            raise SourceError(
                f"{folder.path}: tokenizer_config.json gives {text!r:.40} the id {token}, tokenizer.json makes it "
                f"{tokenizer.token_to_id(text)}; the two are of different models"
            )


def _added(value: Mapping[str, Any], special: bool = False) -> AddedToken:
    from tokenizers import AddedToken

    special = special or value.get("special") is True
    flags = {name: value[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    if any(type(flag) is not bool for flag in flags.values()):
        raise SourceError(f"the added token {_text(value)!r:.40} has {flags!r:.100}, expected true or false")
    return AddedToken(_text(value), **({"normalized": not special} | flags), special=special)


def _text(value: Any) -> str:
    """The text of a token; "" if `value` is not a token."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _edge(
    tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any], role: str
) -> tuple[str, int] | None:
    """The token that goes before ("bos") or after ("eos") a text, if tokenizer_config.json asks for it."""
    if config.get(f"add_{role}_token") is not True or f"{role}_token" not in named:
        return None
    text = _text(named[f"{role}_token"])
    token = tokenizer.token_to_id(text)
    assert token is not None  # `_add_tokens` added it
    return text, token


def _said_otherwise(
    tokenizer: Tokenizer, config: Mapping[str, Any], edges: Mapping[str, tuple[str, int] | None]
) -> list[str]:
    """Where tokenizer_config.json asks for other tokens around a text than tokenizer.json, which counts alone."""
    found = dict(zip(("bos", "eos"), edges_of(tokenizer), strict=True))
    return [
        f"add_{role}_token is {config[f'add_{role}_token']!r:.40}, but tokenizer.json counts, as in transformers 5"
        for role, edge in edges.items()
        if found[role] != ([edge[1]] if edge else [])
    ]


# ---- template ----


def _template(folder: Folder, config: Mapping[str, Any], assumptions: list[str]) -> str | None:
    content = folder.read("chat_template.jinja", MAX_TEMPLATE)
    if content is not None:
        beside = folder.path.glob("additional_chat_templates/*.jinja")
        note_others([file.stem for file in beside], True, assumptions)
        try:
            return whole_template(content.decode(), assumptions)
        except UnicodeDecodeError as error:
            raise SourceError(f"{folder.path}/chat_template.jinja is not UTF-8: {error}") from None
    template = folder.json("chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {str(each.get("name")): each.get("template") for each in template if isinstance(each, dict)}
    if isinstance(named := template, dict):
        template = named.get("default")
        note_others([name for name in named if name != "default"], bool(template), assumptions)
    if template is not None and (type(template) is not str or len(template.encode("utf-8", "replace")) > MAX_TEMPLATE):
        raise SourceError(
            f"{folder.path}: chat_template is {template!r:.80}, expected a text of at most {MAX_TEMPLATE} bytes, "
            "or named ones"
        )
    return whole_template(template, assumptions)
