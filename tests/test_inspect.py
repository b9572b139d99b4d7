"""`bitnet inspect` of every family: what a stack is, in words, and how large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitnet_cli import main
from bitnet_cli.verbs.inspect import what_it_is
from bitnet_export import PackedFile, random_model
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from runtime_models import SMALL
from vision_models import PALIGEMMA, TOWERS, VISION


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "decoder of text: continues it"),
        ({"mask": "prefix"}, "decoder of text: continues it, whose first part sees all of itself"),
        ({"input": "embeddings"}, "decoder of vectors: continues them"),
        ({"has_head": False}, "decoder of text: gives vectors"),
        ({"mask": "bidirectional"}, "encoder of text: gives what stands at each position"),
        ({"mask": "bidirectional", "has_head": False}, "encoder of text: gives vectors"),
        ({"n_experts": 8, "experts_per_token": 2}, "decoder of text: continues it; a token takes 2 of 8 experts"),
        (
            {"image_token": 7, "mask": "prefix"},
            "decoder of text: continues it, whose first part sees all of itself; "
            "vectors of images stand in the places of token 7",
        ),
        ({"input": "draft"}, "draft head: drafts tokens for the stack before it"),
    ],
)
def test_in_words(change: dict[str, Any], words: str) -> None:
    assert what_it_is(SMALL.replace(**change)) == words


def test_images_in_words() -> None:
    assert what_it_is(VISION) == "encoder of images of 14 x 14 pixels: gives a vector of each, of 9 patches"
    assert what_it_is(VISION.replace(pooling="none")) == "encoder of images of 14 x 14 pixels: gives 9 vectors of each"


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert main(["inspect", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(path)]) == 0
    return facts, capsys.readouterr().out


def test_experts_total_and_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SMALL.replace(n_experts=5, experts_per_token=2)
    random_model(config, tmp_path / "m")
    facts, shown = inspected(tmp_path / "m", capsys)
    (stack,) = facts["stacks"]
    attention = 2 * 64 * 64 + 2 * 64 * 32
    ternary = [2 * (attention + n * 3 * 64 * 96) for n in (5, 2)]
    assert [stack["ternary_weights"], stack["active_ternary_weights"]] == ternary
    # 64 of each of four norms of a layer, a router, 96 of each expert's own; the embedding, a norm.
    others = [2 * (3 * 64 + 5 * 64 + n * 96) + 512 * 64 + 64 for n in (5, 2)]
    assert [stack["weights"], stack["active_weights"]] == [a + b for a, b in zip(ternary, others, strict=True)]
    sizes = [(t["bytes"], t["name"]) for t in facts["tensors"]]
    assert stack["bytes"] == sum(size for size, _ in sizes)
    assert stack["active_bytes"] == sum(size for size, name in sizes if not any(f"experts.{i}." in name for i in "234"))
    assert f"{stack['weights']:,} weights" in shown and f"for a token {stack['active_weights']:,} weights" in shown
    assert "a token takes 2 of 5 experts" in shown


def test_a_dense_model_is_all_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(SMALL, tmp_path / "m")
    facts, shown = inspected(tmp_path / "m", capsys)
    (stack,) = facts["stacks"]
    assert stack["weights"] == stack["active_weights"] and "for a token" not in shown
    assert stack["ternary_weights"] == SMALL.ternary_weights and "decoder of text: continues it" in shown


def test_two_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(PALIGEMMA, tmp_path / "m")
    facts, shown = inspected(tmp_path / "m", capsys)
    assert [stack["name"] for stack in facts["stacks"]] == ["decoder", "vision"]
    assert sum(stack["ternary_weights"] for stack in facts["stacks"]) == PALIGEMMA.ternary_weights
    assert [stack["bytes"] for stack in facts["stacks"]] == [
        sum(t["bytes"] for t in facts["tensors"] if t["name"].startswith("stacks.1.") == seeing)
        for seeing in (False, True)
    ]
    assert "stack vision" in shown and "stacks.1.patch.weight" in shown and "image_size=14" in shown


@pytest.mark.parametrize(
    "config",
    [
        SMALL, SMALL.replace(tie_embeddings=False), SMALL.replace(position="sinusoidal"), SMALL.with_draft(),
        SMALL.replace(position="learned"), SMALL.replace(n_experts=5, experts_per_token=2), PALIGEMMA, TOWERS, VISION,
    ],
)  # fmt: skip
def test_parameters_are_those_that_training_counts(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bitnet.model.transformer import Transformer

    random_model(config, tmp_path / "m")
    learned = Transformer(config).named_parameters()  # a similarity has two, which are no tensors in the file
    count = sum(each.numel() for name, each in learned if not name.startswith("similarity."))
    facts, shown = inspected(tmp_path / "m", capsys)
    with Model.load(tmp_path / "m", threads=1) as model:
        assert model.info.parameters == facts["parameters"] == count
    assert f"packed model, {count:,} parameters, " in shown


def test_long_values_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(SMALL, tmp_path / "m")
    file = PackedFile.open(tmp_path / "m")

    def source(spec: Spec) -> Encoded:
        record = file.tensors[spec.key]
        return Encoded(record.encoding, record.scope, file.stored(record), file.scales(record))

    write_packed(tmp_path / "long", file.configs, source, metadata={"about": "x" * 5000, "in": {"it": "y" * 5000}})
    facts, shown = inspected(tmp_path / "long", capsys)
    assert facts["metadata"]["about"] == "x" * 5000
    assert "\nabout: " + "x" * 1000 + "… (5,000 characters)\n" in shown
    assert "  it=" + "y" * 1000 + "… (5,000 characters)\n" in shown


def test_options_that_have_their_defaults_are_shown_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(SMALL.replace(activation="silu"), tmp_path / "m")
    facts, shown = inspected(tmp_path / "m", capsys)
    assert "  dim=64  " in shown and "  activation=silu" in shown
    assert "image_size" not in shown and "rope_beta_fast" not in shown
    assert facts["config"][0]["image_size"] == 0
    made = facts["metadata"]["provenance"]
    assert isinstance(made, dict) and all(f"  {name}={value}" in shown for name, value in made.items())
    assert main(["inspect", str(tmp_path / "m"), "--all"]) == 0
    every = capsys.readouterr().out
    assert all(f"  {name}=" in every for name in ("dim", "activation", "image_size", "rope_beta_fast"))
