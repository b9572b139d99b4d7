"""Small tokenizers of every kind used by published ternary models, saved as their publishers do."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

README = (Path(__file__).parents[1] / "README.md").read_text().splitlines(keepends=True)
SAMPLE = [
    # No figures from tables: two ways to split "000" may be equally likely, and libraries choose differently.
    *(line for line in README if not line.startswith("|")),
    "def f(x):\n    return x  # 123456 €\n", "東京 naïve café straße 🙂", "It's THEY'LL we've", "Привет, мир!",
]  # fmt: skip

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated")


def _bytes(words: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


BYTE_LEVEL: dict[str, tuple[list[Any], list[str], list[str]]] = {  # steps, special tokens, other added tokens
    "llama-bpe": (
        [_split(LLAMA3), _bytes(False)],
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        [],
    ),
    "falcon3": ([_split(LLAMA3), _bytes(False)], [">>TITLE<<", ">>ABSTRACT<<", "<|endoftext|>", "<|assistant|>"], []),
    "qwen2": (
        [_split(QWEN2), _bytes(False)],
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>"],
    ),
    "gpt-2": ([_bytes(True)], ["<|endoftext|>"], []),
    "olmo": ([_bytes(True)], ["<|endoftext|>", "<|padding|>"], []),  # of GPT-NeoX
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            _bytes(True),
            pre_tokenizers.Digits(individual_digits=False),
            _split("[0-9][0-9][0-9]"),
        ],
        [">>TITLE<<", "<|endoftext|>"],
        [],
    ),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), _bytes(True)], ["<|endoftext|>", "<|im_end|>"], []),
}


@cache
def byte_level(kind: str) -> Tokenizer:
    """BPE over bytes; the special tokens follow the trained ones, as in the published files."""
    steps, special, others = BYTE_LEVEL[kind]
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "falcon3")))
    tokenizer.normalizer = normalizers.NFC() if kind in ("qwen2", "olmo") else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        SAMPLE, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in others])
    if kind == "llama-bpe":
        bos = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos]
                ),
            ]
        )
    return tokenizer


@cache
def sentencepiece_model(prefix: bool = True, **options: Any) -> bytes:
    """A tokenizer.model as Meta trained Llama 2's; without prefix as Google trained Gemma's."""
    out = io.BytesIO()
    fixed = {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 640,
        "remove_extra_whitespaces": False, "character_coverage": 0.999, "split_digits": True,
        "allow_whitespace_only_pieces": True, "num_threads": 1, "minloglevel": 2,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.rstrip("\n") for line in SAMPLE]),
        model_writer=out, add_dummy_prefix=prefix, **(fixed | options),
    )  # fmt: skip
    return out.getvalue()


def save(folder: Path, tokenizer: Tokenizer | bytes, *, model_type: str = "llama", **config: Any) -> Path:
    """Write the text files of a published folder. tokenizer: for tokenizer.json, or a tokenizer.model."""
    folder.mkdir(exist_ok=True, parents=True)
    if isinstance(tokenizer, bytes):
        (folder / "tokenizer.model").write_bytes(tokenizer)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def wordpieces(lower: bool) -> Tokenizer:
    """As of BERT."""
    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "abcdehlnorstwxABCDEHLNORSTWXéÉüß日本'"
    words = [*special, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(lowercase=lower), decoders.WordPiece()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    return tokenizer
