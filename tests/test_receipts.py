"""Receipts of answers: any tier finds them true, and any change of a token, a state or a setting shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bitnet_export import random_model
from bitnet_runtime import InvalidParameterError, Model, Receipt, ReceiptError, available_isas
from command import bitnet
from runtime_models import SMALL, byte_tokenizer, scripted_model, small_model
from tool_models import ASK, CALL, TOOLS, calling_model

SCHEMA = {"enum": ["a long value", "another value", "a third"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"seed": 3},
    "greedy": {"temperature": 0},
    "all settings": {
        "temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1, "presence_penalty": 0.3,
        "frequency_penalty": -0.1, "logit_bias": {65: 3.0, 66: float("-inf")}, "repeat_last_n": -1,
    },
    "stop text": {"seed": 1, "stop": ["e", "\x80"]},
    "ends": {"seed": 1, "min_tokens": 6, "stop_token_ids": [*range(32, 127)], "ignore_eos": True},
    "schema": {"seed": 5, "json_schema": SCHEMA},
    "draft": {"seed": 6, "draft": 8, "temperature": 0.4},
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    with Model.load(path, threads=1) as model:
        yield model


def made(model: Model, name: str = "sampled", prompt: str = "Once", n: int = 24) -> Receipt:
    receipt = model.generate(prompt, receipt=True, max_tokens=n, **OPTIONS[name]).receipt
    assert receipt is not None
    return receipt


@pytest.mark.parametrize("kv_type", ["f16", "int8", "k4v8"])
def test_every_tier_finds_them_true(path: Path, kv_type: str) -> None:
    with Model.load(path, threads=1, kv_type=kv_type) as model:
        receipts = [made(model, name) for name in OPTIONS]
    for isa in available_isas():
        with Model.load(path, threads=2, isa=isa) as other:
            for receipt in receipts:
                assert other.verify_receipt(receipt.to_json()).valid


def test_however_the_answer_was_computed(model: Model) -> None:
    for options in OPTIONS.values():
        asked = options | {"seed": 9, "max_tokens": 24}
        expected = made_with(model, asked)
        with model.session() as session:
            session.feed(model.tokenize("Once upon"))
            assert made_with(model, asked, session=session) == dataclasses.replace(expected, n_ctx=session.n_ctx)
        if "draft" not in options:
            assert made_with(model, asked | {"draft": 5}) == expected
            both = model.generate(["Once", "other"], receipt=True, **asked)
            assert both[0].receipt == expected


def made_with(model: Model, options: dict[str, Any], **more: Any) -> Receipt | None:
    return model.generate("Once", receipt=True, **more, **options).receipt


def test_any_token_that_was_changed_is_found(model: Model) -> None:
    for name in ("sampled", "greedy", "schema"):
        receipt = made(model, name)
        for at, token in enumerate(receipt.tokens):
            tokens = [*receipt.tokens[:at], token ^ 1, *receipt.tokens[at + 1 :]]
            assert model.verify_receipt(dataclasses.replace(receipt, tokens=tokens))[:2] == (False, at)
    receipt = made(model)
    for at, digest in enumerate(receipt.digests):
        assert digest is not None
        digests = [*receipt.digests[:at], f"{int(digest, 16) ^ 1:016x}", *receipt.digests[at + 1 :]]
        verdict = model.verify_receipt(dataclasses.replace(receipt, digests=digests))
        assert verdict[:2] == (False, at) and "its digest is another" in verdict.why  # all before it was found true
    for at in range(len(receipt.prompt)):
        prompt = [*receipt.prompt[:at], receipt.prompt[at] ^ 1, *receipt.prompt[at + 1 :]]
        assert model.verify_receipt(dataclasses.replace(receipt, prompt=prompt))[:2] == (False, 0)


def test_whatever_else_was_changed_is_found(model: Model, tmp_path: Path) -> None:
    receipt, n = made(model), 24
    changed = [
        ({"seed": 4}, None),
        ({"kv_type": "f32"}, 0),
        ({"sampling": receipt.sampling | {"temperature": 0.0}}, None),
        ({"tokens": receipt.tokens[:-1], "digests": receipt.digests[:-1]}, n - 1),
        ({"tokens": [*receipt.tokens, 1], "digests": [*receipt.digests, "0"]}, n),
        ({"finish_reason": "stop"}, n),
        ({"model": "0" * 64}, None),
    ]
    for fields, at in changed:
        verdict = model.verify_receipt(dataclasses.replace(receipt, **fields))  # type: ignore[arg-type]
        assert not verdict.valid, fields
        assert at is None or verdict.token == at
    random_model(SMALL, tmp_path / "other", 1, tokenizer=byte_tokenizer().to_str().encode())
    with Model.load(tmp_path / "other", threads=1) as other:
        assert not other.verify_receipt(receipt).valid
        assert other.verify_receipt(dataclasses.replace(receipt, model=other.digest))[:2] == (False, 0)


def test_an_end_token_is_part_of_it(tmp_path: Path) -> None:
    scripted_model(tmp_path / "m", [b"Good", b" day"])
    with Model.load(tmp_path / "m", threads=1) as model:
        receipt = model.generate("hello", receipt=True).receipt
        assert receipt is not None and receipt.end is not None and receipt.finish_reason == "stop"
        assert model.verify_receipt(receipt).valid
        assert model.verify_receipt(dataclasses.replace(receipt, digests=[*receipt.digests[:-1], "0"]))[:2] == (
            False,
            2,
        )
        none = dataclasses.replace(receipt, end=None, digests=receipt.digests[:-1])
        assert not model.verify_receipt(none).valid
        short = dataclasses.replace(receipt, tokens=receipt.tokens[:1], digests=receipt.digests[1:])
        assert not model.verify_receipt(short).valid


@pytest.mark.parametrize("least", [0, 20])
def test_an_answer_that_was_cancelled(model: Model, least: int) -> None:
    stream = model.stream("Once", receipt=True, seed=2, min_tokens=least)
    for _ in range(5):
        next(stream)
    stream.close()
    assert stream.result is not None and stream.result.receipt is not None
    receipt = stream.result.receipt
    assert (len(receipt.tokens), receipt.finish_reason) == (5, "cancelled")
    assert model.verify_receipt(receipt).valid


def test_a_format_needs_a_tokenizer(tmp_path: Path) -> None:
    random_model(SMALL, tmp_path / "m", 1)
    with Model.load(tmp_path / "m", threads=1) as model:
        receipt = model.generate([1, 2, 3], max_tokens=3, receipt=True).receipt
        assert receipt is not None and model.verify_receipt(receipt).valid
        with pytest.raises(ReceiptError, match="tokenizer"):
            model.verify_receipt(dataclasses.replace(receipt, sampling=receipt.sampling | {"grammar": 'root ::= "a"'}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: "[]", "no receipt"),
        (lambda f: {"choices": [{"receipt": f}]}, "in an answer of the server each choice has one"),
        (lambda f: "{", "no JSON"),
        (lambda f: None, "is None, expected its JSON"),
        (lambda f: {}, "no receipt"),
        (lambda f: f | {"model": {1, 2}}, "no JSON"),
        (lambda f: "[" * 100_000, "no JSON"),
        (lambda f: json.dumps(f | {"bitnet_receipt": 2}), "no receipt"),
        (lambda f: json.dumps(f | {"more": 1}), r"has \[.more.\], which no receipt has"),
        (lambda f: json.dumps({name: f[name] for name in f if name != "seed"}), r"lacks \[.seed.\]"),
        (lambda f: json.dumps(f | {"tokens": [1.5]}), "tokens"),
        (lambda f: json.dumps(f | {"digests": []}), "digests"),
        (lambda f: json.dumps(f | {"tokens": [10**6] * 24}), None),
        (lambda f: json.dumps(f | {"tokens": [2**31, *f["tokens"][1:]]}), None),
        (lambda f: json.dumps(f | {"tokens": [*f["tokens"][:5], 10**3000, *f["tokens"][6:]]}), None),
        (lambda f: json.dumps(f | {"tokens": [*f["tokens"][:5], -1, *f["tokens"][6:]]}), None),
        (lambda f: json.dumps(f | {"end": 2**64, "digests": [*f["digests"], None]}), "end"),
        (lambda f: json.dumps(f | {"end": 2**64, "digests": [*f["digests"], None], "finish_reason": "stop"}), None),
        (lambda f: json.dumps(f | {"end": 1, "digests": [*f["digests"], "0"], "finish_reason": "cancelled"}), "end"),
        (lambda f: json.dumps(f | {"tokens": [], "digests": ["0"], "finish_reason": "cancelled"}), "digests"),
        (
            lambda f: json.dumps(f | {"sampling": f["sampling"] | {"max_tokens": 3}, "finish_reason": "cancelled"}),
            None,
        ),
        (lambda f: json.dumps(f | {"sampling": {"regex": "a{1000000}", "max_tokens": 24}}), "regex"),
        (lambda f: json.dumps(f | {"prompt": [10**30]}), "prompt"),
        (lambda f: json.dumps(f | {"prompt": [-1]}), "prompt"),
        (lambda f: json.dumps(f | {"n_ctx": 10**12}), "n_ctx"),
        (lambda f: json.dumps(f | {"n_ctx": 1}), "n_ctx"),
        (lambda f: json.dumps(f | {"kv_type": "f64"}), "kv_type"),
        (lambda f: json.dumps(f | {"seed": -1}), "seed"),
        (lambda f: json.dumps(f | {"adapter": 1}), "adapter"),
        (lambda f: json.dumps(f | {"adapter": [1]}), "adapter"),
        (lambda f: json.dumps(f | {"adapter": "\x1b[2J"}), None),
        (lambda f: json.dumps(f | {"model": "\x1b[2J"}), None),
        (lambda f: json.dumps(f | {"sampling": f["sampling"] | {"seed": 7}}), "sampling"),
        (lambda f: json.dumps(f | {"sampling": f["sampling"] | {"draft": 7}}), "sampling"),
        (lambda f: json.dumps(f | {"sampling": {"temperature": -1}}), "temperature"),
        (lambda f: json.dumps(f | {"sampling": {"max_tokens": 24, "logit_bias": {"x": 1}}}), "logit_bias"),
        (lambda f: json.dumps(f | {"sampling": {"max_tokens": 24, "logit_bias": {"1": 1e39}}}), "logit_bias"),
        (lambda f: json.dumps(f | {"sampling": {"logit_bias": dict.fromkeys(range(512), "-inf")}}), "is ruled out"),
        (lambda f: json.dumps(f | {"sampling": {"json_schema": "{", "max_tokens": 24}}), "json_schema"),
    ],
)
def test_what_is_no_receipt(model: Model, change: Any, message: str | None) -> None:
    text = change(json.loads(made(model).to_json()))
    if message is None:
        verdict = model.verify_receipt(text)
        assert not verdict.valid and len(verdict.why) < 400 and verdict.why.isprintable()
        return
    with pytest.raises(ReceiptError, match=message) as caught:
        model.verify_receipt(text)
    assert len(str(caught.value)) < 400


def test_images_have_no_receipts(model: Model) -> None:
    import numpy as np

    from bitnet_runtime.answers.writer import Writer
    from bitnet_runtime.defaults import Sampling

    with pytest.raises(InvalidParameterError, match="tokens alone"):
        Writer(model, [1], Sampling(), pixels=np.zeros(1, np.float32), receipt=True)


def test_the_command_line(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    done = bitnet("generate", path, "-p", "Once", "-n", "12", "--receipt", file, "--quiet")
    assert done.returncode == 0, done.stderr
    nowhere = bitnet("generate", path, "-p", "Once", "--receipt", tmp_path / "no" / "receipt.json")
    assert (nowhere.returncode, nowhere.stdout) == (1, "") and "create it first" in nowhere.stderr
    (tmp_path / "notes.txt").write_text("mine")
    others = bitnet("generate", path, "-p", "Once", "--receipt", tmp_path / "notes.txt")
    assert (others.returncode, others.stdout) == (1, "") and "exists and is not a receipt" in others.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
    done = bitnet("generate", path, "-p", "Once", "-n", "12", "--receipt", file, "--quiet")  # in place of the first
    again = bitnet("verify-receipt", path, "--isa", "scalar", file)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert "all 12 tokens are those of this model" in again.stderr
    fields = json.loads(file.read_text())
    fields["tokens"][7] ^= 1
    file.write_text(json.dumps(fields))
    wrong = bitnet("verify-receipt", path, file, "--quiet")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "the receipt is not true: token 7 is" in wrong.stderr
    assert json.loads(bitnet("verify-receipt", path, file, "--json").stdout)["token"] == 7
    endless = bitnet("verify-receipt", path, "/dev/zero", "--quiet")
    assert (endless.returncode, "expected at most 67,108,864" in endless.stderr) == (1, True)


def test_the_page_names_all_fields(model: Model) -> None:
    page = (Path(__file__).parent.parent / "docs/receipts.md").read_text(encoding="utf-8")
    receipt = model.generate("ab", max_tokens=1, receipt=True).receipt
    assert receipt and [name for name in json.loads(receipt.to_json()) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("options", "finish"),
    [({"stop": "days"}, "stop"), ({"parallel_tool_calls": False}, "cancelled"), ({"stop": "so"}, "cancelled"),
     ({"max_tokens": 9}, "length")],
)  # fmt: skip
def test_a_conversation_with_calls_is_true(tmp_path: Path, options: dict[str, Any], finish: str) -> None:
    """Stop texts do not count within calls and thoughts, and calls end an answer, which tokens alone do not show."""
    with Model.load(calling_model(tmp_path / "m", f"hm\n{CALL}\nand so")) as model:
        receipt = model.chat(ASK, tools=TOOLS, receipt=True, **options).receipt
        assert receipt is not None and receipt.finish_reason == finish
        assert model.verify_receipt(receipt.to_json()).valid
