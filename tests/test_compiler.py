"""--compile and --recompute: the same model in less time or memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters

import bitnet_cli
from bitnet import kernels
from bitnet.config import ModelConfig
from bitnet.model import compiler
from bitnet.model.compiler import compile_layers
from bitnet.model.transformer import Transformer
from bitnet.train import runlog
from vision_models import PALIGEMMA, VISION

torch.set_num_threads(1)

SMALL = ModelConfig(
    vocab_size=61, dim=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=32,
)  # fmt: skip
MODEL = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context")
TOKENS = torch.arange(48).reshape(2, 24) % 61
DOCUMENTS = torch.arange(48).reshape(2, 24) // 10


def small(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL.replace(**changes))


def gradients(
    model: Transformer,
    amount: float = 1.0,
    bf16: bool = False,
    documents: Tensor | None = None,
    tokens: Tensor = TOKENS,
) -> list[Tensor]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    with model.partly_quantized(amount):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(tokens, documents)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 10 and all(map(Tensor.equal, found, expected))


@pytest.fixture
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("fresh", "torch_alone")
def test_layers_are_one_graph_without_breaks() -> None:
    """ "aot_eager" traces forward and backward as inductor does, and runs the same kernels: the bits stay."""
    model = small()
    compiler.compile_layers(model, "aot_eager")
    counters.clear()  # of the trial
    assert list(model.state_dict()) == list(small().state_dict())
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"documents": DOCUMENTS}),
        (3, {"amount": 0.25}),
        (3, {"amount": 0.5}),  # λ rises without another graph
        (3, {}),
        (4, {"bf16": True}),
    ]
    for graphs, options in cases:
        found = gradients(model, **options)
        assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
        with compiler.eagerly():
            expected = gradients(model, **options)
        assert counters["stats"]["unique_graphs"] == graphs
        assert same(found, expected), options


@pytest.mark.usefixtures("fresh", "torch_alone", "engine_multiplies")
def test_compiled_layers_multiply_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all seven linear layers of a block."""
    called, run = [], kernels._run
    monkeypatch.setattr(kernels, "_run", lambda name, *rest: (called.append(name), run(name, *rest)))
    model = small(n_layers=1)
    compiler.compile_layers(model, "aot_eager")
    counters.clear()  # of the trial
    gradients(model)
    assert called == ["tiles", "linear"] * 7 and not counters["graph_break"]


@pytest.mark.usefixtures("fresh")
def test_a_process_may_train_many_models() -> None:
    """Layers of the third are compiled as those of the first were, where torch would have stopped at two graphs."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for dim in (32, 48, 64):
            model = small(dim=dim, n_layers=1)
            compiler.compile_layers(model, "eager")  # graphs are counted before a backend gets them
            counters.clear()
            gradients(model)
            assert counters["stats"]["unique_graphs"] == 1, dim


@pytest.mark.usefixtures("fresh", "torch_alone")
def test_other_choices_of_experts_compile_nothing_again() -> None:
    """Each expert gets another number of tokens in every pass: it would be compiled again, in some minutes."""
    model = small(n_experts=4, experts_per_token=2)
    compiler.compile_layers(model, "aot_eager")
    counters.clear()  # of the trial
    graphs, loads = set(), set()
    for number in range(3):
        tokens = TOKENS.roll(7 * number, 1) * (number + 1) % 61
        found = gradients(model, tokens=tokens)
        loads.add(tuple(model.blocks[0].load.tolist()))
        graphs.add(counters["stats"]["unique_graphs"])
        with compiler.eagerly():
            assert same(found, gradients(model, tokens=tokens))
    assert len(loads) == 3 and len(graphs) == 1 and min(graphs) > 0


@pytest.mark.usefixtures("fresh")
def test_another_number_of_pictures_compiles_nothing_again() -> None:
    """A batch of conversations has another one in every pass; a graph for one and another for any, at each λ."""
    torch.manual_seed(0)
    model = Transformer(PALIGEMMA.replace(vocab_size=61, image_token=60))
    assert model.vision
    compiler.compile_layers(model, "aot_eager")
    counters.clear()  # of the trial
    graphs = []
    for n in (2, 3, 4, 5):
        pixels = torch.rand(n, 3, VISION.image_size, VISION.image_size)
        model.zero_grad()
        found = model.vision.features(pixels)
        found.square().sum().backward()
        gradients = [p.grad.clone() for p in model.vision.layers.parameters() if p.grad is not None]
        graphs.append(counters["stats"]["unique_graphs"])
        model.zero_grad()
        with compiler.eagerly():
            expected = model.vision.features(pixels)
            expected.square().sum().backward()
        assert found.equal(expected)
        assert same(gradients, [p.grad for p in model.vision.layers.parameters() if p.grad is not None])
    assert graphs == [1, 2, 2, 2] and not counters["graph_break"]


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Callable[..., Any]:
        raise RuntimeError("no g++\nand more")

    monkeypatch.setattr(torch, "__path__", ["/opt/torch"])
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(compiler.CompilerError, match=r"cannot compile here \(no g\+\+\); it needs a C\+\+ compiler"):
        compiler.compile_layers(small())


def test_a_path_that_torch_cannot_compile_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__path__", ["/my programs/torch"])
    with pytest.raises(compiler.CompilerError, match=r"'/my programs/torch', and cannot compile from a path with a sp"):
        compiler.compile_layers(small())


@pytest.mark.parametrize("options", [{}, {"documents": DOCUMENTS}, {"amount": 0.5}, {"bf16": True}])
def test_recomputing_changes_no_bit(options: dict[str, Any]) -> None:
    model, results = small(), []
    for model.recompute in (False, True):
        results.append(gradients(model, **options))
    assert same(*results)


def losses(folder: Path) -> list[dict[str, Any]]:
    """The log without its clock, and without the largest inputs: compiled, those of the first batch of a step."""
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in runlog.read(folder / "log.jsonl")]
    assert [bool(r.get("layers", {}).pop("absmax", None)) for r in records].count(True) == 2
    return records


@pytest.mark.usefixtures("fresh", "torch_alone")
def test_a_run_with_both_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log, evaluation, records of layers, checkpoint: with kernels that are the same, to the bit."""
    (tmp_path / "a.txt").write_text("the red cat sees the house and the dog runs " * 200)
    options = [f"--set={name}={value}" for name, value in SMALL.to_dict().items() if name in MODEL]
    options += ["--data", str(tmp_path / "a.txt"), "--tokenizer", "byte", "--threads", "1", "--batch", "2"]
    options += ["--steps", "6", "--layers-every", "3", "--eval-every", "3", "--accumulate", "2"]
    assert bitnet_cli.main(["train", *options, "--out", str(tmp_path / "plain")]) == 0
    monkeypatch.setattr(compiler, "compile_layers", lambda model: compile_layers(model, "aot_eager"))
    counters.clear()
    assert bitnet_cli.main(["train", *options, "--out", str(tmp_path / "fast"), "--compile", "--recompute"]) == 0
    # The trial; layers and head at λ < 1, and at 1.
    assert counters["stats"]["unique_graphs"] == 5 and not counters["graph_break"]
    assert losses(tmp_path / "fast") == losses(tmp_path / "plain") and len(losses(tmp_path / "plain")) == 9
    plain, fast = (load_file(tmp_path / run / "step-000006" / "model.safetensors") for run in ("plain", "fast"))
    assert plain.keys() == fast.keys() and all(plain[name].equal(fast[name]) for name in plain)


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__path__[0], reason="torch cannot compile from a path with a space")
def test_compiled_kernels_agree_with_eager_ones() -> None:
    """Sums in another order move a norm or γ by its last bit, and logits by 1e-7 of the largest; 1e-5 leaves room
    for other vector widths. An int8 code that such a bit moves over its rounding edge moves one token by more."""
    model = small(n_layers=1)
    with torch.no_grad():
        expected = model(TOKENS)
        compiler.compile_layers(model)
        counters.clear()  # of the trial
        found = model(TOKENS)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert (found - expected).abs().mean() < 1e-3 * expected.abs().max()
    assert (found - expected).abs().amax(-1).median() < 1e-5 * expected.abs().max()


def test_models_are_imported_without_the_compiler() -> None:
    """It takes a second, and most commands compile nothing."""
    program = "import sys, bitnet.model.transformer, bitnet_export; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
