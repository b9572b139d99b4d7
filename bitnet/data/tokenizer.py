"""Tokenizers, stored as JSON of the `tokenizers` library, so that the runtime needs one loader.

Four kinds, all lossless on any text: `bpe` (byte-level BPE), `llama-bpe` (the same with Llama 3's
pre-tokenizer, which llama.cpp also has), `byte` (256 bytes), `char` (the most common characters, bytes
for the rest). Token 0 is <|endoftext|>: it precedes every document and is BOS and EOS in generation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bitnet_runtime.tokenizer.infilling import NAMES

END = "<|endoftext|>"
END_ID = 0
MASK = "<|mask|>"
IMAGE = "<image>"
"""The placeholder of image vectors in a decoder's input; others use the same name."""
FIM = NAMES[0]
"""Tokens before the prefix, the suffix and the middle of a gap."""
MASKS = (MASK, "[MASK]", "<mask>")
"""Names of the mask token: ours, and those of others."""
KINDS = ("bpe", "llama-bpe", "byte", "char")

# Pieces that BPE never merges across: a word with one space before it, up to three digits,
# punctuation, the indentation of a line, other spaces. Like GPT-4's, made for source code.
PIECES = r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*[\r\n]+[ \t]*|\s+"

# The pieces of Llama 3, from its tokenizer.json.
LLAMA_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

LONGEST = 1000
"""Most bytes of a piece from which merges are learnt: their cost grows with the square of its length, so that one
line of DNA would take hours."""


def check_kind(kind: str) -> None:
    """Raises ValueError if there is no such kind of tokenizer."""
    if kind not in KINDS:
        found = "is a folder" if Path(kind).is_dir() else "is not a file"
        raise ValueError(f"tokenizer is {kind!r}, which {found}, expected {', '.join(KINDS)} or a tokenizer.json")


def build(kind: str, texts: Iterable[str], vocab_size: int, *more: str) -> Tokenizer:
    """A new tokenizer of at most `vocab_size` tokens, trained on `texts`. more: the last tokens, such as MASK.

    Raises ValueError if vocab_size cannot hold the 256 bytes and the special tokens.
    """
    check_kind(kind)
    special = [END, *more]
    if vocab_size < 256 + len(special):
        least, named = 256 + len(special), " and ".join(special)
        raise ValueError(f"vocab_size is {vocab_size}, expected at least {least}: the 256 bytes and {named}")
    vocab_size -= len(special) - 1
    tokenizer = (
        _characters(texts, vocab_size) if kind == "char" else _bytes(LLAMA_PIECES if kind == "llama-bpe" else PIECES)
    )
    if kind in ("bpe", "llama-bpe"):
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        whole = tokenizer.pre_tokenizer
        cut = pre_tokenizers.Split(Regex(f".{{1,{LONGEST}}}"), behavior="isolated")  # letters, each of a byte
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([whole, cut])
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.pre_tokenizer = whole
        tokenizer.model.ignore_merges = kind == "llama-bpe"  # as in llama.cpp: a known piece is one token
    tokenizer.add_special_tokens(special)
    return _plain(tokenizer)


def load(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json; raises ValueError when it is not one."""
    try:
        definition = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a tokenizer.json, which is UTF-8: {error}") from None
    return parse(definition, str(path))


def parse(definition: str, what: str) -> Tokenizer:
    """The tokenizer that the text of a tokenizer.json defines. what: its name in errors (ValueError)."""
    from bitnet_runtime.tokenizer import definitions  # loads the engine

    try:
        definitions.parse(definition.encode())
        return _plain(Tokenizer.from_str(definition))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{what} is not a tokenizer.json of the tokenizers library: {error}") from None


def encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Iterator[list[int]]]:
    """Encodes texts as the engine does: what spells a special token is text, also where the model of the tokenizer has
    that token, as Unigram's have </s>, which is HTML, too."""
    from bitnet_runtime.tokenizer import definitions, text

    definition = tokenizer.to_str().encode()
    _, within = definitions.out_of_reach(definitions.parse(definition))
    special = {tokenizer.token_to_id(each) for each in within}
    engine = text.Tokenizer(definition, vocabulary_size(tokenizer)) if within else None

    def encode(texts: Sequence[str]) -> Iterator[list[int]]:
        found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for each, encoding in zip(texts, found, strict=True):
            ids: list[int] = encoding.ids
            yield engine.encode(each, add_bos=False) if engine and not special.isdisjoint(ids) else ids

    return encode


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Largest token id plus 1; ids may have gaps, so there may be fewer tokens."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def separator(tokenizer: Tokenizer, generation: Mapping[str, Any], packed: bool = False) -> int:
    """The token before every document: the start token of the model, else an end token, else the one that the
    tokenizer itself adds before a text, as BERT's does.

    generation: defaults of a checkpoint. packed: both are of a packed file. Raises ValueError if there is none.
    """
    ends = generation.get("eos_token_ids") or []
    for token in (generation.get("bos_token_id"), tokenizer.token_to_id(END), *ends[:1], *tokenizer.encode("").ids[:1]):
        if _is_token(tokenizer, token):
            return int(token)
    where = " of its source, and write the packed file again" if packed else ""
    raise ValueError(
        f"the tokenizer has no {END} and nothing names its start and end tokens, so documents would run together; "
        f'put a tokenizer_config.json with "bos_token" or "eos_token" beside the tokenizer.json{where}'
    )


def defaults(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> Mapping[str, Any]:
    """`generation` of a checkpoint as in its packed file: if empty, END is the start and end token."""
    end = tokenizer.token_to_id(END)
    return generation if generation or end is None else {"eos_token_ids": [end], "bos_token_id": end}


def end_token(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> int:
    """The token that ends an answer. generation: defaults of a checkpoint. Raises ValueError if there is none."""
    for token in (*(generation.get("eos_token_ids") or []), tokenizer.token_to_id(END)):
        if _is_token(tokenizer, token):
            return int(token)
    raise ValueError(f"the tokenizer has no {END} and nothing names its end token, so no answer would end")


def _is_token(tokenizer: Tokenizer, token: Any) -> bool:
    return isinstance(token, int) and token >= 0 and tokenizer.id_to_token(token) is not None


def image_token(tokenizer: Tokenizer) -> int:
    """The image token, added to the tokenizer if it has none."""
    if tokenizer.token_to_id(IMAGE) is None:
        tokenizer.add_special_tokens([IMAGE])
    token = tokenizer.token_to_id(IMAGE)
    assert token is not None
    return token


def fim_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The ids of FIM. Raises ValueError if any is missing."""
    prefix, suffix, middle = map(tokenizer.token_to_id, FIM)
    if prefix is None or suffix is None or middle is None:
        raise ValueError(
            f"the tokenizer lacks tokens to fill in the middle, expected {', '.join(FIM)}; add them to the "
            "tokenizer.json as special tokens, or let `bitnet train`, or `bitnet tokenize --fim`, make a tokenizer"
        )
    return prefix, suffix, middle


def ends_beside(file: str | Path) -> dict[str, Any]:
    """`generation` of a checkpoint from tokenizer_config.json next to a tokenizer.json; empty without it.

    A text ends with the end token, or with the start token of the next document. Raises ValueError for unknown tokens.
    """
    words, config = load(file), Path(file).with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is damaged: {error}") from None
    found: dict[str, int] = {}
    for name in ("bos_token", "eos_token"):
        token = said.get(name) if isinstance(said, dict) else None
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            continue
        number = words.token_to_id(text) if isinstance(text, str) else None
        if number is None:
            raise ValueError(f"{config}: {name} is {text!r:.80}, which is no token of {Path(file).name}")
        found[name] = number
    if not found:
        return {}
    start = {"bos_token_id": found["bos_token"]} if "bos_token" in found else {}
    return {"eos_token_ids": list(dict.fromkeys(reversed(found.values())))} | start


def mask_token(tokenizer: Tokenizer) -> int:
    """The mask token. Raises ValueError if there is none."""
    found = (tokenizer.token_to_id(name) for name in MASKS)
    token = next((token for token in found if token is not None), None)
    if token is None:
        raise ValueError(
            f"the tokenizer has no mask token, expected one of {', '.join(MASKS)}; add it to the "
            "tokenizer.json as a special token, or let `bitnet train` make a tokenizer"
        )
    return token


def _bytes(pieces: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {END: END_ID} | {letter: i for i, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [c for c, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: vocab_size - len(names)]]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")  # short pieces: linear time
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Text that spells a special token stays text, so that only code of ours inserts END_ID; no truncation or padding,
    which files of published models may ask for."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
