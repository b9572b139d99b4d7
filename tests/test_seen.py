"""What tokens see, as a mask and as blocks for torch's `flex_attention`, against the rule itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from bitnet.config import ModelConfig
from bitnet.model import block, compiler, masks, transformer
from bitnet.model.attention import attention_in_blocks
from bitnet.model.transformer import Transformer

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU only so


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, int, int, Tensor | None, Tensor | None, Tensor]:
    """Arguments of `visible` for a batch of two rows: a document may have the number of an earlier one."""
    n = draw(st.integers(1, 300) if draw(st.booleans()) else st.integers(1, 9))
    mask, window = draw(st.sampled_from(["causal", "bidirectional", "prefix"])), draw(st.integers(0, n))
    cuts = [draw(st.lists(st.integers(0, n), max_size=4)) for _ in range(2)]
    rows = [[sum(at >= cut for cut in row) % 3 for at in range(n)] for row in cuts]
    prefix = torch.tensor([draw(st.integers(1, n)) for _ in range(2)]) if mask == "prefix" else None
    return mask, n, window, torch.tensor(rows) if draw(st.booleans()) else None, prefix, torch.zeros(2, n)


def by_the_rule(
    mask: str, n: int, window: int, documents: Tensor | None, prefix: Tensor | None, like: Tensor
) -> Tensor:
    rows = like if documents is None else documents
    runs = [[number for number, (_, run) in enumerate(itertools.groupby(row)) for _ in run] for row in rows.tolist()]
    i, j, of = torch.arange(n)[:, None], torch.arange(n), torch.tensor(runs)
    sees = torch.ones(2, n, n, dtype=torch.bool) if mask == "bidirectional" else (j <= i).repeat(2, 1, 1)
    if prefix is not None:
        sees |= (j < prefix[:, None])[:, None]
    if window:
        sees &= (i - j).abs() < window
    return sees & (of[:, :, None] == of[:, None])


@given(rules())
@settings(max_examples=15, deadline=None)
def test_masks_and_blocks_are_the_rule(rule: Any) -> None:
    expected = by_the_rule(*rule)
    found = masks.visible(*rule)
    assert found.expand(2, 1, *found.shape[-2:])[:, 0].equal(expected)
    made = masks.blocks(*rule)
    theirs = create_block_mask(lambda b, _, i, j: expected[b, i, j], 2, None, rule[1], rule[1], device="cpu")
    # Blocks in one row may hold more than is seen by any, between what two of its tokens see; never less.
    assert (made.to_dense() >= theirs.to_dense()).all()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, rule[1], 16, generator=generator) for heads in (4, 2, 2))
    found = attention_in_blocks(q, k, v, made, 0.3)
    values = F.scaled_dot_product_attention(q, k, v, expected[:, None], scale=0.3, enable_gqa=True)
    # Means of numbers of about 1, in fp32: 2⁻²⁴ each for the weights, the product and the sum.
    assert torch.allclose(found, values, atol=1e-5, rtol=0)


def test_documents_leave_blocks_out() -> None:
    documents = torch.arange(1024).div(200, rounding_mode="floor")[None]
    found = masks.blocks("causal", 1024, 0, documents, None, documents).to_dense()
    assert found.sum() == sum(i - i * 128 // 200 * 200 // 128 + 1 for i in range(8)) == 17  # of 36 without documents


def test_blocks_are_made_without_waiting_for_the_device() -> None:
    """On the meta device nothing can be read back, and no shape may depend on values."""
    documents, prefix = torch.zeros(2, 300, dtype=torch.long, device="meta"), torch.ones(2, device="meta")
    for mask, told in (("causal", None), ("bidirectional", None), ("prefix", prefix.long())):
        found = masks.blocks(mask, 300, 50, documents, told, documents)
        assert found.kv_indices.device.type == "meta" and found.kv_indices.shape == (2, 1, 3, 3)


def test_layers_take_blocks_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """New blocks in each step, no new graph and no break; the values are those of a mask. torch has the gradient of
    this attention on GPUs alone, where test_gpu.py compares it: here it has none."""

    def forward_only(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        return attention_in_blocks(q.detach(), k.detach(), v.detach(), *how)

    monkeypatch.setattr(block, "attention_in_blocks", forward_only)
    monkeypatch.setattr(transformer, "LONGEST", 100)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=61, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=300,
        sliding_window=90, global_every=2, embedding_scale=8.0,
    )  # fmt: skip
    model = Transformer(config).double()  # in fp64 no activation lies at a rounding edge
    tokens = torch.randint(0, 61, (2, 300))
    torch._dynamo.reset()
    compiler.compile_layers(model, "eager")
    assert not model.in_blocks  # on a CPU
    counters.clear()
    for each in (40, 150):
        documents = (torch.arange(300) // each).expand(2, 300)
        with compiler.eagerly():
            model.in_blocks = False
            expected = model(tokens, documents)
        model.in_blocks = True
        assert torch.allclose(model(tokens, documents), expected, atol=1e-9, rtol=0)
        with torch.no_grad(), compiler.eagerly():
            assert model(tokens, documents).equal(expected)  # evaluations keep their masks
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
