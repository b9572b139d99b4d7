"""Texts for SigLIP: the tokens of its class in transformers, which changes a text more than tokenizer.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import SiglipTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_runtime.tokenizer.text import Tokenizer as Runtime

TEXTS = [
    "A Cat ON a MAT.", "ÄÖ İstanbul", "  two  spaces ", "a photo of 2 dogs, one (small) & one big!", "-", "", " ", ".",
    "it's \t a\ncat-and-dog", ". a", "▁a▁b ▁", "x=<y>; z|w~{}[]^`@#$%*+/\\", "“quoted” — dash… ¿qué?", "ﬁne ½ Ｆｕｌｌ",
    *foreign.SAMPLE,
]  # fmt: skip


def read(folder: Path) -> Runtime:
    definition, _, generation, _ = tokenizer_of(Folder(folder), 1000)
    assert definition is not None
    return Runtime(definition, 1 << 21, generation.get("bos_token_id"))


def unigram(model: bytes) -> Tokenizer:
    """The tokenizer.json that is published with it: as transformers converts a SentencePiece model of this kind."""
    proto: Any = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    tokenizer = Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in proto.pieces], unk_id=2))
    spaces = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    known = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    tokenizer.normalizer = normalizers.Sequence([known, *spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


@pytest.mark.parametrize("lower", [True, False])
def test_a_siglip_drops_punctuation(lower: bool, tmp_path: Path) -> None:
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    fixed = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    options = {"byte_fallback": False, "split_digits": False, "allow_whitespace_only_pieces": False}
    model = foreign.sentencepiece_model(True, **fixed, **options, **ids, vocab_size=300)
    (tmp_path / "spiece.model").write_bytes(model)
    theirs = SiglipTokenizer(str(tmp_path / "spiece.model"), do_lower_case=lower)
    config = {"tokenizer_class": "SiglipTokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {} if lower else {"do_lower_case": False}
    ours = read(foreign.save(tmp_path / "m", unigram(model), model_type="siglip", **config))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text[:80]
    assert ours.encode("a cat, a dog!") == ours.encode("a cat a  dog")
    assert (ours.encode("A Cat") == ours.encode("a cat")) == lower
