"""The draft layer: at every position of a text it computes what a chain of single steps computes, and it does not
affect the model it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet.config import ModelConfig, not_yet
from bitnet.model.draft import STEPS, Steps, accepted
from bitnet.model.head import draft_loss
from bitnet.model.transformer import Transformer
from bitnet.straight_through import embedding_rows
from bitnet_export.packed import random_model
from bitnet_export.packed.reader import PackedFile

SMALL = ModelConfig(
    vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_context=32
).with_draft()

KINDS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 4},
    {"sliding_window": 5, "global_every": 2, "rope_local_theta": 100.0},
    {"tie_embeddings": False, "head_bias": True, "logit_softcap": 5.0, "norm": "layer", "norm_bias": True},
    {"position": "learned", "embedding_scale": 3.0, "qk_norm": True, "post_norm": True},
    {"n_experts": 3, "experts_per_token": 2, "ffn": "plain", "head_format": "f32"},
]


def test_a_draft_has_no_adapters() -> None:
    config = SMALL.replace(draft=None, adapter_rank=4, adapters=("q", "down")).with_draft()
    assert config.adapters and not_yet(config) == []


def made(changes: dict[str, Any], seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(SMALL.replace(draft=None).replace(**changes).with_draft())
    for name, parameter in model.named_parameters():
        if name.endswith("_norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def texts(n: int, length: int = 20) -> Tensor:
    return torch.randint(0, 61, (n, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("changes", KINDS)
def test_unrolled_steps_are_those_of_a_chain(changes: dict[str, Any]) -> None:
    """A chain of steps computed one by one: its own state is put in place of the model's, entry by entry."""
    model = made(changes).eval()
    draft, config, tokens = model.draft, model.config, texts(2)
    assert draft and model.embedding
    with torch.no_grad(), model.partly_quantized(0.0):  # a float model: rounding to int8 makes edges of 1e-6
        hidden = model.hidden(tokens)[:, :-1]
        rows = embedding_rows(tokens, model.embedding.weight, config.head_format, 0.0)[:, 1:]
        found = draft.states(hidden, rows, None, STEPS)
        for last in (STEPS, 9, hidden.shape[1] - 1):  # the entry at which chains end
            for step in range(STEPS):
                states = hidden[:, : last + 1].clone()
                for m in range(step + 1):
                    at = last - step + m
                    (out,) = draft.states(states[:, : at + 1], rows[:, : at + 1])
                    if at < last:
                        states[:, at + 1] = out[:, at]
                torch.testing.assert_close(found[step][:, last], out[:, last], rtol=1e-4, atol=1e-5)


def test_texts_of_one_row_do_not_see_each_other() -> None:
    """Each has the states that it has alone, and no chain crosses the boundary."""
    model, tokens = made({}).train(), texts(1, 14)
    documents = torch.tensor([[0] * 6 + [1] * 8])
    targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    targets[0, 5] = targets[0, 13] = -100
    model(tokens, documents, targets_BT=targets)
    together = model.drafted
    assert together and model.draft
    assert together.counts.sum((1, 2)).tolist() == [4 + 6, 3 + 5, 2 + 4]
    alone = []
    for part in (slice(0, 6), slice(6, 14)):
        model(tokens[:, part], targets_BT=targets[:, part])
        assert model.drafted
        alone.append(model.drafted.loss)
    torch.testing.assert_close(together.loss, torch.stack(alone).sum(), rtol=1e-4, atol=0)


def test_the_model_does_not_notice_its_draft() -> None:
    with_draft, without = made({}), made({})
    without.draft = None
    tokens = texts(3)
    losses = []
    for model in (with_draft, without):
        loss = model(tokens[:, :-1], targets_BT=tokens[:, 1:])
        losses.append(loss)
        (loss + model.drafted.loss if model.drafted else loss).backward()
    assert torch.equal(*losses)
    theirs = dict(without.named_parameters())
    for name, parameter in with_draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert name.startswith("draft.") or torch.equal(parameter.grad, theirs[name].grad), name  # type: ignore[arg-type]


def test_the_model_begins_with_the_same_weights() -> None:
    found = []
    for config in (SMALL, SMALL.replace(draft=None)):
        torch.manual_seed(0)
        found.append((Transformer(config).state_dict(), torch.rand(())))
    (with_draft, after), (without, as_after) = found
    assert all(torch.equal(with_draft[name], tensor) for name, tensor in without.items())
    assert torch.equal(after, as_after)  # what is drawn then is the same, too


@pytest.mark.parametrize("changes", [KINDS[0], KINDS[3], {"head_format": "ternary"}])
def test_the_gradient_is_that_of_the_formula(changes: dict[str, Any]) -> None:
    """Compared with the loss written out with whole logits, for a float model in fp64."""
    model = made(changes).double()
    tokens = texts(2, 9)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 4] = -100
    names = [name for name, _ in model.named_parameters() if name.startswith("draft.")]
    parameters = [model.get_parameter(name) for name in names]
    with model.partly_quantized(0.0):
        model(inputs, targets_BT=targets)
        assert model.drafted and model.draft and model.embedding
        found = torch.autograd.grad(model.drafted.loss, parameters)
        with torch.no_grad():
            hidden, head = model.hidden(inputs), model.own_head
        states = model.draft.states(hidden[:, :-1], model.embedding(inputs)[:, 1:].detach(), None, STEPS)
        with torch.no_grad():
            taught = 0.9 * head.logits(hidden[:, 1:]).softmax(-1)
            taught += 0.1 * torch.nn.functional.one_hot(targets[:, 1:].clamp(min=0), 61)
            x, to_come = hidden[:, 1:].flatten(0, 1), targets[:, 1:].flatten()
            _, right = draft_loss(torch.stack([x, -x]), x, to_come, to_come.expand(2, -1) >= 0, (0.5, 0.5), head)
            assert right[0].all() and not right[1].any()
        loss = torch.zeros((), dtype=torch.float64)
        for step, (state, weight) in enumerate(zip(states, (0.51, 0.31, 0.18), strict=True)):
            each = -(taught * head.logits(state).log_softmax(-1)).sum(-1)
            counts = targets[:, 1:] >= 0
            counts = counts & (torch.arange(counts.shape[1]) >= step)
            loss = loss + weight * (each * counts).sum()
        expected = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(model.drafted.loss, loss)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_accepted_counts_whole_chains() -> None:
    right = torch.tensor([[[1, 1, 0, 1, 1]], [[0, 1, 1, 0, 1]], [[0, 0, 1, 0, 1]]], dtype=torch.bool)
    counts = torch.tensor([[[1, 1, 1, 1, 1]], [[0, 1, 1, 1, 1]], [[0, 0, 1, 1, 1]]], dtype=torch.bool)
    every, n = accepted(Steps(torch.zeros(()), counts, right))
    assert n.tolist() == [5, 4, 3]
    assert every.tolist() == [4, 3, 1]  # of two guesses those from entries 0, 1 and 3; of three that from 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask": "bidirectional"}, "mask is 'bidirectional', expected 'causal' of a model with a draft"),
        ({"has_head": False, "tie_embeddings": False}, "has_head is False, expected True"),
        ({"name": "draft"}, "name and draft.name are both 'draft'"),
        ({"draft": SMALL.draft and SMALL.draft.replace(dim=16)}, "draft.dim is 16, expected 32"),
        ({"draft": SMALL.replace(draft=None)}, "draft.input is 'tokens', expected 'draft'"),
        ({"draft": {"vocab_size": 3}}, "draft: model option 'dim' is missing"),
        ({"draft": 3}, "draft is 3, expected a table of options"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        SMALL.replace(**changes)
    assert said in str(error.value)


def test_a_draft_is_as_wide_and_long_as_its_model() -> None:
    longer = SMALL.replace(max_context=64, dim=48)
    assert longer.draft and (longer.draft.max_context, longer.draft.dim) == (64, 48)
    assert ModelConfig.from_dict(longer.to_dict()) == longer


@pytest.mark.parametrize("encoding", ["2.0", "1.6"])
def test_a_file_holds_both_stacks(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "m.bitnet"
    random_model.random_model(SMALL, file, encoding=encoding)
    read = PackedFile.open(file)
    assert read.config == SMALL
    ternary = sum(r.rows * r.cols for k, r in read.tensors.items() if r.encoding.ternary)
    assert ternary == SMALL.ternary_weights
    names = {key.parameter(SMALL.stacks) for key in read.tensors if not key.name.endswith("frequencies")}
    assert names == set(Transformer(SMALL).state_dict())
