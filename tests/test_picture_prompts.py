"""Training and evaluation see exactly the tokens that the engine gets for the same question or caption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from bitnet.config import ModelConfig
from bitnet.data import pictures, tokenizer
from bitnet.data.picture_files import Record
from bitnet.data.picture_rows import Answers, Captions
from bitnet.evaluate import packed_pictures
from bitnet.settings import Settings
from bitnet.setup import sights
from bitnet_runtime import Model
from bitnet_runtime.answers.ready import text_tokens
from image_models import packed
from picture_data import halves
from runtime_models import byte_tokenizer
from vision_models import CAUSAL, PALIGEMMA, TOWERS

QUESTIONS = ("how many?", "how many?\n", "\n\n", "", "grün ")
CAPTIONS = ("a red ring", " two\n", "x")
SPECIAL = ("<start>", "<end>", tokenizer.IMAGE)


def words_with(around: str, end: bool) -> Tokenizer:
    """A tokenizer that adds tokens around a text, with or without the end token of our own tokenizers."""
    words = tokenizer.build("byte", [], 257) if end else byte_tokenizer()
    words.add_special_tokens(list(SPECIAL))
    special = [(name, words.token_to_id(name)) for name in SPECIAL]
    words.post_processor = TemplateProcessing(single=around, special_tokens=special)
    words.encode_special_tokens = True
    return words


def records(folder: Path, questions: bool) -> pictures.Side:
    (name, _, _), (other, _, _) = halves(folder, 2)
    if not questions:
        return pictures.every(Record((folder / name,), "", text, "here") for text in CAPTIONS)
    seen = ((folder / name,), (folder / name, folder / other), ())
    return pictures.every(Record(seen[i % 3], text, "three", "here") for i, text in enumerate(QUESTIONS))


Rows = Callable[[ModelConfig, bool], tuple[Answers | Captions, Path]]


@pytest.fixture
def made(around: str, generation: dict[str, Any], tmp_path: Path) -> Rows:
    """The records as a run has them, and a packed file of such a run. generation: of the checkpoint."""

    def make(config: ModelConfig, questions: bool) -> tuple[Answers | Captions, Path]:
        words = words_with(around, end=not generation)
        ids = {key: words.token_to_id(text) for key, text in generation.items() if isinstance(text, str)}
        said = generation | ids | ({"eos_token_ids": [words.token_to_id("<end>")]} if generation else {})
        config = config.replace(vocab_size=words.get_vocab_size(), max_context=64)
        if questions:
            config = config.replace(image_token=words.token_to_id(tokenizer.IMAGE))
        assert config.vision
        sight, first = pictures.Sight.of(config.vision, said), tokenizer.separator(words, said)
        kept = pictures.store(records(tmp_path, questions), words, sight, tmp_path, "train", first)
        settings = Settings(objective="next" if questions else "contrastive")
        rows = sights.rows(settings, config.vision, words, said, kept, 64)
        defaults, asked = dict(tokenizer.defaults(words, said)), sights.template(words, said) if questions else ""
        file = packed(tmp_path / "m.bitnet", config, generation=defaults, words=words, template=asked)
        return rows, file

    return make


PADDING = {"length": 30, "token_id": 3}
FRAMES = [
    ("$A", {}),  # a tokenizer made here
    ("$A", {"temperature": 0.5}),  # no start token
    ("$A", {"bos_token_id": "<start>"}),
    ("<start> $A", {"bos_token_id": "<start>"}),
    ("<start> $A", {"temperature": 0.5}),
    ("$A <end>", {"bos_token_id": "<start>"}),
    ("$A <end>", {"padding": PADDING | {"side": "right"}}),
    ("$A", {"padding": PADDING | {"side": "left"}}),
]


@pytest.mark.parametrize(("around", "generation"), FRAMES)
def test_questions_are_learnt_as_the_engine_is_asked(made: Rows) -> None:
    rows, file = made(PALIGEMMA, True)
    assert isinstance(rows, Answers)
    with Model.load(file, threads=1) as model:
        for i, text in enumerate(QUESTIONS):
            before, answer = rows.parts(i)
            n = len(rows.images(i))
            assert before.tolist() == model.image_prompt(text, n)
            parts = [*[{"type": "image", "image": "a"}] * n, {"type": "text", "text": text}]
            said = {"role": "user", "content": parts if n else text}
            assert before.tolist() == model.apply_template([{"role": "assistant", "content": "no"}, said])
            assert answer[-1] in model.end_tokens and rows.lengths[i] == len(before) + len(answer) - 1


@pytest.mark.parametrize(("around", "generation"), FRAMES)
def test_captions_are_learnt_as_the_engine_is_given_texts(made: Rows) -> None:
    rows, file = made(TOWERS, False)
    assert isinstance(rows, Captions)
    with Model.load(file, threads=1) as model:
        for i, text in enumerate(CAPTIONS):
            assert rows.text(i, 64).tolist() == text_tokens(model, text)


@pytest.mark.parametrize(("around", "generation"), [("$A", {"bos_token_id": "<start>"})])
@pytest.mark.parametrize("config", [PALIGEMMA, CAUSAL], ids=["prefix", "causal"])
def test_a_packed_decoder_is_measured_on_what_it_is_asked(config: ModelConfig, made: Rows, tmp_path: Path) -> None:
    """The loss is that of the logits that follow from `generate` with the pictures and the words of the records."""
    _, file = made(config, True)
    data = tmp_path / "a.jsonl"
    data.write_text('{"image": "0.png", "prefix": "how many?", "suffix": "three"}\n')
    with Model.load(file, threads=1) as model:
        words = tokenizer.parse(model.tokenizer_json.decode(), "it")
        found = packed_pictures.evaluate(model, words, [str(data)], 64, tmp_path)
        answer, expected = [*model.tokenize("three", add_bos=False), min(model.end_tokens)], 0.0
        with model.session() as session:
            model.generate("how many?", images=tmp_path / "0.png", session=session, max_tokens=1)
            for token in answer:
                logits = session.logits
                assert logits is not None
                expected += float(np.logaddexp.reduce(logits.astype(np.float64)) - logits[token])
                session.append([token])
    assert found.tokens == len(answer) and found.nats_per_token == pytest.approx(expected / len(answer), rel=1e-12)
