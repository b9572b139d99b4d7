"""--compile and --recompute: the same model in less time or memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bitnet import compiler
from bitnet.config import ModelConfig
from bitnet.model import Transformer

torch.set_num_threads(1)

SMALL = ModelConfig(
    vocab_size=61, dim=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=32,
)  # fmt: skip
TOKENS = torch.arange(48).reshape(2, 24) % 61
DOCUMENTS = torch.arange(48).reshape(2, 24) // 10


def small(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL.replace(**changes))


def gradients(
    model: Transformer, amount: float = 1.0, bf16: bool = False, documents: Tensor | None = None
) -> list[Tensor]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    with model.partly_quantized(amount):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(TOKENS, documents)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 10 and all(map(Tensor.equal, found, expected))


@pytest.fixture
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("fresh")
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


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Callable[..., Any]:
        raise RuntimeError("no g++\nand more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(compiler.CompilerError, match=r"cannot compile here \(no g\+\+\); it needs a C\+\+ compiler"):
        compiler.compile_layers(small())


@pytest.mark.parametrize("options", [{}, {"documents": DOCUMENTS}, {"amount": 0.5}, {"bf16": True}])
def test_recomputing_changes_no_bit_and_saves_memory(options: dict[str, Any]) -> None:
    model, sizes = small(), []
    results = []
    for model.recompute in (False, True):
        results.append(gradients(model, **options))
        sizes.append(saved_bytes(model))
    assert same(*results)
    assert sizes[1] < 0.5 * sizes[0]


def saved_bytes(model: Transformer) -> int:
    """Bytes of all tensors that a forward pass keeps for the backward pass, each storage once, parameters not."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TOKENS).sum()
    loss.backward()
    return sum(kept.values())
