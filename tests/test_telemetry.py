"""What training records about each layer, and what that costs."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bitnet_cli
from bitnet.config import ModelConfig
from bitnet.model import compiler
from bitnet.model.head import Head
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.quant import ternary_codes
from bitnet.settings import Settings
from bitnet.straight_through import embedding_rows
from bitnet.train import runlog
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.telemetry import QUANTITIES, Probe

torch.set_num_threads(1)

SHAPE = {"vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 48}
SHAPE |= {"max_context": 32}
TINY = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
TINY += [
    "--tokenizer",
    "byte",
    "--threads",
    "1",
    "--steps",
    "40",
    "--batch",
    "4",
    "--eval-every",
    "20",
    "--save-every",
    "20",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(0)
    file.write_text(" ".join(rng.choice(["the", "cat", "sees", "a", "red", "house"]) for _ in range(9000)))
    return str(file)


def learn(text: str, out: Path, *more: str) -> int:
    return bitnet_cli.main(["train", *TINY, "--data", text, "--out", str(out), *more])


def bits(run: Path) -> list[bytes]:
    folder = Checkpoint.open(run).folder
    return [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


# ---- the numbers ----


def test_numbers_worked_by_hand() -> None:
    """W = 24 weights of 1 and 8 of 0 in each row: γ = 0.75, thresholds at 0.375, near is 0.3375 to 0.4125."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE))
    w = model.layers[1].q.weight  # type: ignore[union-attr]
    assert isinstance(w, Tensor)
    row = torch.tensor([1.0] * 24 + [0.0] * 8)
    tokens = torch.tensor([[5, 7, 9], [1, 2, 3]])
    with torch.no_grad():
        w.copy_(row.expand_as(w))
        probe = Probe(model)
        with probe.looking():
            model(tokens)
        w[0, :4] = torch.tensor([-1.0, 0.0, 1.0, 1.0])  # two codes flip, and 1/1024 less of |W|: γ = 767/1024
        w[0, 24] = 0.4  # a third flips, and is near: |0.4 / 0.7494 - 0.5| = 0.034
    record = probe.record()
    n = w.numel()
    assert n == 1024 and tuple(record) == QUANTITIES
    assert record["flips"]["q"] == [0.0, pytest.approx(3 / n, rel=1e-4)]  # five digits are kept
    assert record["zeros"]["q"][1] == pytest.approx(256 / n, rel=1e-4)  # one more, one less
    assert record["near"]["q"][1] == pytest.approx(1 / n, rel=1e-4)
    assert record["gamma"]["q"][1] == pytest.approx((767 + 0.4) / n, rel=1e-4)
    first = model.layers[0].attn_norm(embedding_rows(tokens, model.embedding.weight, "int8"))  # type: ignore[union-attr, operator]
    largest = pytest.approx(first.abs().max().item(), rel=1e-4)
    assert record["absmax"]["q"][0] == record["absmax"]["k"][0] == record["absmax"]["v"][0] == largest
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"linear_norm": True, "pre_norm": False, "sub_norm": False},
        {"pre_norm": False, "sub_norm": False},
        {"weight_scale": "row"},
        {"weight_scale": "group", "ffn": "plain"},
        {"ternary": ("q", "down")},
    ],
)
def test_every_kind_of_model_is_watched(options: dict[str, Any]) -> None:
    """absmax is that of what the quantizer gets."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**SHAPE | options))
    seen: dict[str, list[float]] = {}
    probe = Probe(model)
    with probe.looking(), watching_quantizers() as inputs:
        model(torch.randint(257, (2, 8)))
    record = probe.record()
    roles = [r for r in ("q", "k", "v", "o", "gate", "up", "down") if r in model.config.ternary]
    roles = [r for r in roles if r != "gate" or model.config.ffn == "gated"]
    assert all(list(record[name]) == roles for name in QUANTITIES)
    for role in roles:
        weights = [id(getattr(block, role).weight) for block in model.layers]
        seen[role] = [float(f"{max(inputs[w]):.5g}") for w in weights]
        assert record["flips"][role] == [0.0, 0.0]
    assert record["absmax"] == seen


def test_nothing_to_watch() -> None:
    probe = Probe(Transformer(ModelConfig(**SHAPE | {"ternary": ()})))
    with probe.looking():
        pass
    assert probe.record() == {}


def test_experts_count_together_and_how_often_each_is_taken() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE, n_experts=3, experts_per_token=2))
    tokens = torch.randint(0, 257, (2, 16))
    probe = Probe(model)
    with probe.looking():
        model(tokens)
    record = probe.records()
    layers, loads = record["layers"], record["experts"]
    assert [len(values) for values in layers["zeros"].values()] == [2] * 7
    for layer, load in enumerate(loads):
        experts = model.blocks[layer].experts
        codes = [ternary_codes(expert.get_parameter("up.weight"))[0] for expert in experts]
        assert layers["zeros"]["up"][layer] == pytest.approx(float((torch.stack(codes) == 0).float().mean()), rel=1e-4)
        assert len(load) == 3 and sum(load) == pytest.approx(1, abs=1e-4)
        assert load == pytest.approx(model.blocks[layer].load.tolist(), rel=1e-4)


class watching_quantizers:  # noqa: N801  (used as a function)
    """Largest |x| of every product with a ternary weight, found where it is computed instead of by hooks."""

    def __enter__(self) -> dict[int, list[float]]:
        from bitnet import bitlinear

        self.patch, inner = pytest.MonkeyPatch(), bitlinear.ternary_linear
        found: dict[int, list[float]] = defaultdict(list)

        def watch(x: Tensor, *weights: Tensor, **how: Any) -> tuple[Tensor, ...]:
            for w in weights:
                found[id(w)].append(x.abs().max().item())
            return inner(x, *weights, **how)

        self.patch.setattr(bitlinear, "ternary_linear", watch)
        return found

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


# ---- what it costs ----


class Work(TorchDispatchMode):
    """Counts the bytes that the operations below autograd read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves((args, out)) if isinstance(t, Tensor))
        return out


def test_a_record_costs_less_than_one_percent() -> None:
    """Bytes touched: of a record every `layers_every` steps, against those of the steps between.

    Products count as one read and write, though they do much more than that: the share of time is smaller.
    """
    torch.manual_seed(0)
    model = Transformer(PRESETS["tiny"].replace(n_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(2048, (8, 257))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    with Work() as plain:
        step()
    with Work() as watched:
        probe = Probe(model)
        with probe.looking():
            step()
        probe.record()
    assert plain.bytes < watched.bytes
    assert (watched.bytes - plain.bytes) / Settings().layers_every < 0.01 * plain.bytes


def test_watching_changes_no_bit(text: str, tmp_path: Path) -> None:
    for every in (0, 1):
        options = ["--layers-every", str(every), "--accumulate", "2", "--steps", "10"]
        assert learn(text, tmp_path / str(every), *options) == 0
    assert bits(tmp_path / "0") == bits(tmp_path / "1")
    with_layers = [[r["step"] for r in runlog.read(tmp_path / e / "log.jsonl") if "layers" in r] for e in ("0", "1")]
    assert with_layers == [[], list(range(1, 11))]


@pytest.mark.usefixtures("torch_alone")
def test_compiled_steps_stay_compiled(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry is taken in a pass of its own, as small as others: no layer of a step runs eagerly, no bit changes."""
    compile_layers = compiler.compile_layers
    monkeypatch.setattr(compiler, "compile_layers", lambda model: compile_layers(model, backend="eager"))
    eagerly, inside = compiler.eagerly, []
    backward = Tensor.backward

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        with eagerly():
            inside.append(True)
            yield
            inside.pop()

    def learns(*args: Any, **kwargs: Any) -> None:
        assert not inside
        backward(*args, **kwargs)

    def at_once(*_: Any) -> Tensor:
        raise AssertionError("all logits of a batch are in memory")

    monkeypatch.setattr(Head, "logits", at_once)
    monkeypatch.setattr(compiler, "eagerly", counted)
    monkeypatch.setattr(Tensor, "backward", learns)
    for name, more in (("as written", []), ("0", ["--compile", "--layers-every", "0"]), ("1", ["--compile"])):
        assert learn(text, tmp_path / name, "--steps", "4", "--layers-every", "2", "--precision", "fp32", *more) == 0
    assert bits(tmp_path / "0") == bits(tmp_path / "1")
    found = [[r["layers"] for r in runlog.read(tmp_path / name / "log.jsonl") if "layers" in r]
             for name in ("as written", "1")]  # fmt: skip
    assert len(found[0]) == 2 and found[0] == found[1]
