"""Tokens of folders that older versions of transformers wrote: in files beside tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.folder import Folder
from token_samples import of_folder, runtime, same

PAD = {"content": "<pad>", "lstrip": False, "rstrip": True, "single_word": False, "normalized": False}


@pytest.mark.parametrize("listed", [True, False], ids=["added_tokens.json", ""])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pad_token": "<|endoftext|>"}, {"pad_token": PAD}),
        ({}, {"additional_special_tokens": ["<pad>", "<other>"]}),
        ({"additional_special_tokens": ["<pad>"]}, {"additional_special_tokens": ["<other>"]}),
        ({"extra_special_tokens": ["<pad>"]}, {"extra_special_tokens": ["<other>", "<pad>"]}),
        ({"extra_special_tokens": [], "additional_special_tokens": ["<pad>"]}, {"unk_token": ""}),
    ],
    ids=str,
)
def test_tokens_of_older_folders(config: dict[str, Any], said: dict[str, Any], listed: bool, tmp_path: Path) -> None:
    words = foreign.byte_level("gpt-2")
    folder = foreign.save(tmp_path, words, tokenizer_class="PreTrainedTokenizerFast", **config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **said}))
    if listed:
        first = words.get_vocab_size()
        (folder / "added_tokens.json").write_text(json.dumps({"<pad>": first, "<New>": first + 1}))
    definition, _, generation, _ = of_folder(Folder(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    same(runtime(definition, generation), theirs, ["a<pad> b", "<pad> <New>", "a <New>b<other>", "<|endoftext|>"])
