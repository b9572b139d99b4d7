"""Adapters in the engine: what they add, to which texts, and that the bits are the same however they are computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export import PackedFile, random_adapter, random_model, repack
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model, ModelFormatError, SessionFileError
from bitnet_runtime.errors import BitnetError, InvalidParameterError
from bitnet_runtime.machine import available_isas
from bitnet_runtime.shape import checksum_of, digest_of
from packed_files import SMALL, as_stored
from runtime_models import append_together

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
SHAPES = {
    "gated": SMALL,
    "experts": SMALL.replace(n_experts=4, experts_per_token=2, sub_norm=False),
    "norms": SMALL.replace(linear_norm=True, pre_norm=False, post_norm=True, ffn="plain", activation="gelu"),
    "relu": SMALL.replace(dim=130, ffn_dim=300, sub_norm=False),
}


def made(folder: Path, config: ModelConfig = SMALL, ranks: tuple[int, ...] = (3, 16)) -> tuple[Path, list[Path]]:
    """A model and adapters of it, the last of which leaves some linears alone."""
    base = folder / "base.bitnet"
    random_model(config, base)
    adapters = [folder / f"a{rank}.bitnet" for rank in ranks]
    for rank, path in zip(ranks, adapters, strict=True):
        linears = TERNARY_LINEARS if path != adapters[-1] else ("k", "o", "up", "down")
        linears = tuple(role for role in linears if config.ffn == "gated" or role != "gate")
        random_adapter(base, path, rank, rank=rank, linears=linears)
    return base, adapters


def logits(model: Model, adapter: str | None, prompt: list[int] = PROMPT) -> Any:
    with model.session(adapter=adapter) as session:
        return session.append(prompt, "all")


def joined(base: Path, adapter: Path, path: Path) -> Path:
    """A model whose own adapter it is."""
    model, added = PackedFile.open(base), PackedFile.open(adapter, adapter=True)

    def source(spec: Spec) -> Encoded:
        file = added if spec.key.part > 1 else model
        return as_stored(file, file.tensors[spec.key])

    write_packed(path, added.configs, source)
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_whatever_computes_it(shape: str, tmp_path: Path) -> None:
    """Tiers, threads, cuts of the prompt, company, and an adapter that is part of the model or beside it."""
    base, adapters = made(tmp_path, SHAPES[shape].replace(max_context=96))
    text = 4 * PROMPT  # so long that each of two threads has rows of its own
    names: list[str | None] = [None, *(path.stem for path in adapters)]
    with Model.load(base, isa="scalar", threads=1, kv_type="f32", adapters=adapters) as model:
        expected = {name: logits(model, name, text) for name in names}
    with Model.load(base, threads=1, kv_type="f32") as model:
        assert (logits(model, None, text) == expected[None]).all()
    for one, other in itertools.combinations(names, 2):
        assert not np.isclose(expected[one], expected[other], atol=1e-3).all()
    for isa, threads in ((None, 1), (None, 2), ("avx2", 2), ("scalar", 3)):
        if isa not in (None, *available_isas()):
            continue
        with Model.load(base, isa=isa, threads=threads, kv_type="f32", adapters=adapters) as model:
            for name in names:
                assert (logits(model, name, text) == expected[name]).all(), (isa, threads, name)
            sessions = [model.session(adapter=name) for name in (*names, *names)]
            for session in sessions:
                session.feed(text[:-1])
            append_together(sessions, [text[-1]] * len(sessions))
            for session in sessions:
                assert (session.logits == expected[session.adapter][-1]).all()
                session.close()
    for path in adapters:
        with Model.load(joined(base, path, tmp_path / "joined.bitnet"), kv_type="f32") as model:
            assert (logits(model, None, text) == expected[path.stem]).all()


def test_lines_that_are_left_out_are_not_those_an_adapter_wakes(tmp_path: Path) -> None:
    """`up` by lines is read where the gate is positive, which an adapter of the gate decides, too."""
    base, adapters = made(tmp_path, SHAPES["relu"], (16, 4))
    repack(base, tmp_path / "sparse.bitnet", sparse=True)
    sparse = tmp_path / "sparse-16.bitnet"
    random_adapter(tmp_path / "sparse.bitnet", sparse, 16, rank=16)
    with Model.load(base, kv_type="f32", adapters=adapters) as model:
        expected = logits(model, "a16")
    with Model.load(tmp_path / "sparse.bitnet", kv_type="f32", adapters=[sparse]) as model:
        assert (logits(model, "sparse-16") == expected).all()


def test_a_text_keeps_its_adapter(tmp_path: Path) -> None:
    """In a fork, a file, an answer and a receipt; a text cannot go on with another adapter."""
    base, adapters = made(tmp_path)
    with Model.load(base, adapters={"one": adapters[0], "two": adapters[1]}) as model:
        assert model.adapters == ("one", "two")
        with model.session(adapter="two") as session:
            session.feed(PROMPT)
            with session.fork() as fork:
                assert fork.adapter == "two"
                fork.rewind(5)
                fork.feed(PROMPT[5:])
                assert (fork.logits == session.logits).all()
            session.save(tmp_path / "saved")
            expected = session.logits
        with model.load_session(tmp_path / "saved") as again:
            assert again.adapter == "two" and (again.logits == expected).all()
        answers = {name: model.generate(PROMPT, adapter=name, seed=1, max_tokens=8) for name in (None, "one", "two")}
        assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
        with model.session(adapter="one") as session:
            assert model.generate(PROMPT, session=session, seed=1, max_tokens=8).tokens == answers["one"].tokens
            with pytest.raises(InvalidParameterError, match="adapter is 'two', and the session is of 'one'"):
                model.generate(PROMPT, session=session, adapter="two")
        batch = model.generate([PROMPT, PROMPT[:9]], adapter="two", seed=1, max_tokens=8)
        assert batch[0].tokens == answers["two"].tokens
        assert model.score(PROMPT, adapter="one")[1:] != model.score(PROMPT)[1:]
        assert (model.embed(PROMPT, pooling="mean", adapter="one") != model.embed(PROMPT, pooling="mean")).any()
        receipt = model.generate(PROMPT, adapter="two", seed=1, max_tokens=8, receipt=True).receipt
        assert receipt is not None and receipt.adapter and model.verify_receipt(receipt.to_json()).valid
        plain = model.generate(PROMPT, seed=1, max_tokens=8, receipt=True).receipt
        assert plain is not None and plain.adapter is None and model.verify_receipt(plain).valid
        with pytest.raises(InvalidParameterError, match="adapter is 'three', expected one of one, two"):
            model.generate(PROMPT, adapter="three")
    with Model.load(base, adapters=[adapters[1], adapters[0]]) as model:  # in another order, under other names
        with model.load_session(tmp_path / "saved") as again:
            assert again.adapter == "a16" and (again.logits == expected).all()
        assert model.verify_receipt(receipt).valid
        other = model.verify_receipt(receipt.to_json().replace(str(receipt.adapter), str(digest_of(model, "a3"))))
        assert not other.valid and other.token == 0
    with Model.load(base, adapters=adapters[:1]) as model:
        with pytest.raises(SessionFileError, match=r"has an adapter .* not among the 1"):
            model.load_session(tmp_path / "saved")
        verdict = model.verify_receipt(receipt)
        assert not verdict.valid and "none of those that the model was loaded with" in verdict.why


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, adapters = made(tmp_path)
    other, twin, merged = (tmp_path / name for name in ("other.bitnet", "twin.bitnet", "merged.bitnet"))
    random_model(SMALL, other, 1)
    random_model(SMALL, twin, tokenizer=b"{}")  # the same weights, told of otherwise
    joined(base, adapters[0], merged)
    Model.load(twin, adapters=adapters).close()
    for path in (other, merged):
        with pytest.raises(ModelFormatError, match=r"a3.bitnet: it belongs to a model with .* this one has"):
            Model.load(path, adapters=[tmp_path / "a3.bitnet"])
    with pytest.raises(ModelFormatError, match="it is a model, expected an adapter"):
        Model.load(base, adapters=[other])
    with pytest.raises(
        ModelFormatError,
        match=r"another kind, .* expected the model .*; open that, with this file as its adapter$",
    ):
        Model.load(adapters[0])
    with pytest.raises(BitnetError, match=r"missing: No such file .*; expected an adapter, as"):
        Model.load(base, adapters=[tmp_path / "missing"])
    with pytest.raises(InvalidParameterError, match="two adapters have the name"):
        Model.load(base, adapters=[adapters[0], adapters[0]])
    wrong: Any
    for wrong in ({5: adapters[0]}, {"": adapters[0]}):
        with pytest.raises(InvalidParameterError, match=r"an adapter has the name (5|''|\"\"), expected a text"):
            Model.load(base, adapters=wrong)
    for wrong in (str(adapters[0]), b"a", 5, None):
        with pytest.raises(InvalidParameterError, match=r"adapters is .*, expected a list of files"):
            Model.load(base, adapters=wrong)
    with pytest.raises(InvalidParameterError, match="path has a zero byte, expected the name of a packed file"):
        Model.load(base, adapters=["a\0b"])
    random_adapter(merged, tmp_path / "upon.bitnet")  # a model may have one of its own, and others upon it
    with Model.load(merged, adapters=[tmp_path / "upon.bitnet"]) as model:
        assert (logits(model, None) != logits(model, "upon")).any()
        sums = [path.read_bytes()[60:64][::-1].hex() for path in (merged, tmp_path / "upon.bitnet")]
        assert [model.checksum, checksum_of(model, "upon")] == sums


def test_a_draft_of_the_model_changes_no_answer(tmp_path: Path) -> None:
    """It guesses from states that an adapter changed, and has none itself."""
    config = SMALL.replace(vocab_size=64).with_draft()
    base, adapters = made(tmp_path, config, (4, 5))
    with Model.load(base, adapters=adapters) as model:
        for name in (None, *model.adapters):
            plain = model.generate(PROMPT, adapter=name, seed=1, max_tokens=10, draft=0)
            assert model.generate(PROMPT, adapter=name, seed=1, max_tokens=10, draft=4).tokens == plain.tokens
