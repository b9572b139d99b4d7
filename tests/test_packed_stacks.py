"""Stacks of a packed file that form a model, and those that do not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, PackedFormatError
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model, ModelFormatError, UnsupportedModelError
from packed_files import SEEING, TOWERS, as_stored, packed_bytes


def unfit_stacks() -> Iterator[tuple[str, bytes]]:
    """Files of two stacks, each valid, that do not form a model (export/FORMAT.md §2)."""
    decoder, eye, text, tower = *SEEING.stacks, *TOWERS.stacks
    for name, stacks in {
        "images first": (eye, decoder), "towers, images first": (tower, text),
        "one name": (text, tower.replace(name="text")), "two of images": (eye, tower.replace(name="other")),
        "bidirectional decoder": (decoder.replace(mask="bidirectional"), eye),
        "decoder of another width": (decoder, eye.replace(out_dim=23)),
        "texts of another width": (text, tower.replace(out_dim=23)),
        "no token for images": (decoder.replace(image_token=0), eye),
        "decoder without a head": (decoder.replace(has_head=False, tie_embeddings=False), eye),
        "no pooling of texts": (text.replace(pooling="none"), tower), "no pooling of images": (text, eye),
        "embeddings": (text.replace(input="embeddings", vocab_size=0), tower),
    }.items():  # fmt: skip
        yield name, _packed_stacks(stacks)


def fit_stacks() -> Iterator[tuple[str, bytes]]:
    """Files of stacks that form a model."""
    decoder, eye, text, tower = *SEEING.stacks, *TOWERS.stacks
    for name, stacks in {
        "decoder": (decoder, eye), "causal decoder": (decoder.replace(mask="causal"), eye), "towers": (text, tower),
        "images alone": (eye,), "text alone, with a token for images": (decoder,), "pooled images": (decoder, tower),
    }.items():  # fmt: skip
        yield name, _packed_stacks(stacks)


def _packed_stacks(stacks: tuple[ModelConfig, ...]) -> bytes:
    """A file of these stacks, each with the tensors of a separate random model."""
    files = [PackedFile(packed_bytes(stack)) for stack in stacks]

    def source(spec: Spec) -> Encoded:
        file = files[spec.key.stack]
        return as_stored(file, file.tensors[spec.key._replace(stack=0)])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bitnet"
        write_packed(path, stacks, source)
        return path.read_bytes()


@pytest.mark.parametrize(("name", "file"), [*unfit_stacks()], ids=lambda value: value if isinstance(value, str) else "")
def test_stacks_that_make_no_model(name: str, file: bytes, tmp_path: Path) -> None:
    """Refused by the engine and by who reads the configuration."""
    (tmp_path / name).write_bytes(file)
    with pytest.raises(PackedFormatError, match="the stacks do not go together"):
        _ = PackedFile(file).config
    with pytest.raises((ModelFormatError, UnsupportedModelError)):
        Model.load(tmp_path / name, threads=1)


@pytest.mark.parametrize(("name", "file"), [*fit_stacks()], ids=lambda value: value if isinstance(value, str) else "")
def test_stacks_that_make_a_model(name: str, file: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(file)
    assert PackedFile(file).config.stacks == PackedFile(file).configs
    Model.load(tmp_path / name, threads=1).close()
