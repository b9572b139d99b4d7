"""Learning which of two answers is preferred: records, rows, loss, and a run whose exported file has the same
preference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.data import conversations, dataset, packing, preferences, tokenizer
from bitnet.data.dialogues import Encoder, with_template
from bitnet.model.head import PORTION, Head, log_probabilities
from bitnet.model.transformer import Transformer
from bitnet.report import page
from bitnet.train import preferences as learning
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import export_checkpoint
from bitnet_runtime import Model
from bitnet_runtime.chat.tools import Tools
from training import bitnet, bits, killed_before, losses

torch.set_num_threads(1)

ASKED = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Good day", "What"))
SHAPE: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 48, "max_context": 64,
}  # fmt: skip


def written(folder: Path, *records: Any) -> list[Path]:
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [file]


def spelling() -> preferences.Spelling:
    words = tokenizer.build("byte", [], 300)
    words.encode_special_tokens = True
    template, generation = with_template(words, None, {})
    encoder = Encoder(words, template, generation)
    return preferences.Spelling(words, tokenizer.END_ID, generation["eos_token_ids"][0], encoder)


def pairs(n: int) -> preferences.Preferences:
    said = [preferences.Preference("q" * (1 + i % 5), "a" * (1 + i % 7), "bc" * (1 + i % 3)) for i in range(n)]
    return preferences.Preferences(said, spelling())


# ---- records ----


def test_the_forms_of_a_record_say_the_same(tmp_path: Path) -> None:
    forms: list[dict[str, Any]] = [
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 9.5},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    ]
    how = spelling()
    found = [how.pair(each) for each in preferences.read(written(tmp_path, *forms))]
    for chosen, rejected in found:
        assert chosen.ids.tolist() == found[0][0].ids.tolist() and rejected.ids.tolist() == found[0][1].ids.tolist()
        learnt = [
            how.words.decode(text.ids[text.counts].tolist(), skip_special_tokens=False) for text in (chosen, rejected)
        ]
        assert learnt == ["Good day<|im_end|>", "What<|im_end|>"]


def test_what_both_lists_begin_with_is_the_prompt(tmp_path: Path) -> None:
    """Each side may go on with several messages; only its answers are compared, not the questions between them."""
    why = {"role": "user", "content": "why?"}
    said = {"role": "assistant", "content": "So"}
    how = spelling()
    records = [
        {"chosen": [ASKED, said, ASKED, GOOD, why, said], "rejected": [ASKED, said, ASKED, BAD]},
        {"prompt": [ASKED, said, ASKED], "chosen": [GOOD, why, said], "rejected": [BAD]},
    ]
    found = list(preferences.read(written(tmp_path, *records)))
    assert found[0].prompt == found[1].prompt == json.dumps([ASKED, said, ASKED], sort_keys=True)
    for each in found:
        learnt = [how.words.decode(t.ids[t.counts].tolist(), skip_special_tokens=False) for t in how.pair(each)]
        assert learnt == ["Good day<|im_end|>So<|im_end|>", "What<|im_end|>"]
        assert "why?" in how.words.decode(how.pair(each)[0].ids.tolist())
    assert len(preferences.split([*found, found[0]._replace(prompt="x")], 0.5)[0]) == 1  # both forms are one pair


def test_several_answers_that_the_template_does_not_write_as_one_text(tmp_path: Path) -> None:
    """A template that writes an answer only while it is the last has no text with two of them."""
    words = tokenizer.build("byte", [], 300)
    words.encode_special_tokens = True
    _, generation = with_template(words, None, {})
    template = "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}:{% endif %}{% endfor %}"
    how = preferences.Spelling(
        words, tokenizer.END_ID, words.token_to_id("<|im_end|>"), Encoder(words, template, generation)
    )
    record = {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, BAD]}
    (pair,) = preferences.read(written(tmp_path, record))
    with pytest.raises(
        dataset.DataError, match=r"p\.jsonl, line 1: the chat template writes an earlier answer otherwise"
    ):
        how.pair(pair)


def test_of_texts_what_goes_on_with_the_prompt_is_learnt(tmp_path: Path) -> None:
    how = spelling()
    (found,) = preferences.read(written(tmp_path, {"prompt": "Say: ", "chosen": "yes", "rejected": "<|im_end|>"}))
    chosen, rejected = how.pair(found)
    assert how.words.decode(chosen.ids[1:-1].tolist()) == "Say: yes" and chosen.ids[0] == tokenizer.END_ID
    assert chosen.counts.tolist() == [False] * 6 + [True] * 4
    assert rejected.counts.sum() == len("<|im_end|>") + 1  # text, however it looks


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (3, 'expected {"prompt"'),
        ({"prompt": "x", "chosen": "y"}, 'expected {"prompt"'),
        ({"chosen": "x y", "rejected": "x z"}, 'expected {"prompt"'),
        ({"prompt": 3, "chosen": "y", "rejected": "z"}, 'expected {"prompt"'),
        ({"prompt": "x", "chosen": "y", "rejected": [BAD]}, 'expected {"prompt"'),
        ({"prompt": [ASKED], "chosen": [], "rejected": []}, "expected an answer of assistant"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the roles are assistant; expected an answer of assistant after"),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [3]}, "a message is 3"),
        ({"prompt": [ASKED, GOOD, ASKED], "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]}, "has the weight 0"),
        (
            {"chosen": [ASKED, GOOD], "rejected": [{"role": "user", "content": "ho"}, BAD]},
            "the two differ first in message 1, of 'user'",
        ),
        ({"chosen": [ASKED, GOOD, ASKED], "rejected": [ASKED, GOOD, ASKED]}, "the last message is of 'user'"),
        (
            {"prompt": [{"role": "system", "content": "be brief"}, ASKED], "chosen": [ASKED, GOOD], "rejected": [BAD]},
            '"prompt" ends with a message of user, and "chosen" begins with one',
        ),
        ({"system": "be brief", "prompt": "hi", "chosen": "y", "rejected": "n"}, '"system" stands beside the answers'),
        ({"prompt": "\ud800", "chosen": "y", "rejected": "z"}, "half of a surrogate pair"),
    ],
)
def test_bad_records_are_named(record: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(dataset.DataError, match=r"p\.jsonl, line 1: ") as error:
        list(preferences.read(written(tmp_path, record)))
    assert message in str(error.value)


def test_a_prompt_is_on_one_side_alone() -> None:
    said = [preferences.Preference(f"{i % 20}", f"{i}", "no") for i in range(100)]
    told: list[str] = []
    sides = preferences.split([*said, *said[:3], preferences.Preference("x", "same", "same")], 0.3, told.append)
    assert sum(map(len, sides)) == 100 and not {each.prompt for each in sides[0]} & {each.prompt for each in sides[1]}
    assert 3 <= len({each.prompt for each in sides[1]}) <= 9  # of 20
    assert told[0].startswith("3 of 104 preferences are repetitions")
    assert told[1] == "1 of 104 preferences have the same answer twice and were left out"
    assert [[len(side) for side in preferences.split(said, share)] for share in (1e-6, 1 - 1e-9)] == [[95, 5], [5, 95]]
    tools = [Tools.of([{"type": "function", "function": {"name": name}}]) for name in "fgf"]
    talks = [[conversations.Conversation([ASKED, answer], "here", offer) for answer in (GOOD, BAD)] for offer in tools]
    offered = [preferences.Preference(str(i // 3), *talks[i % 3]) for i in range(6)]
    assert sum(map(len, preferences.split(offered, 0.5))) == 4  # other tools are another question
    with pytest.raises(dataset.DataError, match="1 different prompts, expected at least 2"):
        preferences.split([preferences.Preference("x", "a", "b")] * 2, 0.5)


# ---- rows and loss ----


@pytest.mark.parametrize("more", [{}, {"logit_softcap": 3.0, "head_bias": True, "tie_embeddings": False}])
def test_log_probabilities_and_their_gradient(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PORTION, "cpu", 200)  # in portions
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=50, **SHAPE, ternary=(), head_format="f32", **more)
    x, w = torch.randn(2, 9, 32).double().requires_grad_(), torch.randn(50, 32).double().requires_grad_()
    bias = torch.randn(50).double().requires_grad_() if more else None
    targets = torch.randint(0, 50, (2, 9))
    targets[0, :4] = dataset.IGNORED
    weights = torch.randn(2, 9).double()
    head = Head(config, w, bias)
    learnt = [x, w, *([bias] if bias is not None else [])]
    best = head.logits(x).argmax(-1)
    targets[1, :4] = best[1, :4]
    found, likeliest = log_probabilities(head, x, targets)
    assert likeliest.equal((best == targets).double()) and 4 <= likeliest.sum() < 14
    expected = -F.cross_entropy(head.logits(x).flatten(0, 1), targets.flatten(), reduction="none").view(2, 9)
    close = {"rtol": 0, "atol": 1e-10}  # fp64 sums of 50 in another order
    assert torch.allclose(found, expected, **close) and not found[0, :4].any()
    ours, theirs = (torch.autograd.grad((each * weights).sum(), learnt) for each in (found, expected))
    assert all(torch.allclose(a, b, **close) for a, b in zip(ours, theirs, strict=True))


def test_packed_is_unpacked() -> None:
    """The log-probabilities of each answer in a row of several are those of the answer alone."""
    found = pairs(23)
    torch.manual_seed(0)
    # Float layers: behind a quantizer the last bit of a sum may move an activation over an edge (design §10).
    model = Transformer(ModelConfig(vocab_size=300, **SHAPE, ternary=(), head_format="f32")).double().eval()
    rows = found.window(range(found.windows(60)), 60)
    with torch.no_grad():
        numbers, said = learning._said(model, *rows)
        said = said[numbers.argsort()]
        for i, pair in enumerate(found.pairs):
            for side, text in enumerate(pair):
                ids = torch.from_numpy(text.ids).long()
                logs = model(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                alone = logs[torch.from_numpy(text.counts[1:])].sum()
                assert abs(float(said[i, side] - alone)) < 1e-9  # fp64 sums in another order
    assert sorted(numbers.tolist()) == list(range(23)) and len(rows[0]) < 2 * 23 / 3
    assert learning.counted(rows[2]) == 23


def test_the_loss_by_hand() -> None:
    found = pairs(2)
    rows = found.window(range(found.windows(60)), 60)
    logs = torch.zeros(rows[0].shape)
    for pair, (chosen, rejected) in enumerate([(-1.0, -3.0), (-2.0, -1.5)]):
        for row, value in ((0, chosen), (1, rejected)):
            at = int((rows[2][row] == pair).nonzero()[0])
            logs[row, at] = value
    reference = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
    terms = learning.terms(lambda *_, **__: torch.stack([logs, logs]), reference, 0.5, *rows)  # type: ignore[arg-type]
    margins = [0.5 * ((-1 + 2) - (-3 + 2)), 0.5 * ((-2 + 1) - (-1.5 + 1))]
    loss = sum(math.log(1 + math.exp(-margin)) for margin in margins)
    expected = {"preference": loss, "margin": sum(margins), "accuracy": 1.0, "chosen": 0.5 * (1 - 1)}
    for name, value in expected.items():
        assert float(terms[name]) == pytest.approx(value, abs=1e-6), name  # fp32


def test_pairs_that_are_in_a_batch_twice_count_twice() -> None:
    """A set may have fewer rows than a batch."""
    found = pairs(5)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=300, **SHAPE, ternary=(), head_format="f32")).eval()
    once, twice = (found.window([*range(found.windows(60))] * n, 60) for n in (1, 2))
    with torch.no_grad():
        numbers, reference = learning._said(model, *once)
        before = reference[numbers.argsort()] - torch.tensor([3.0, 1.0])
        terms = [learning.terms(model, before, 0.5, *rows) for rows in (once, twice)]
    assert float(terms[0]["chosen"]) == pytest.approx(5 * 0.5 * 3, abs=1e-3)  # fp32 sums, of up to 100
    assert [learning.counted(rows[2]) for rows in (once, twice)] == [5, 10]
    for name, value in terms[0].items():
        assert float(terms[1][name]) == pytest.approx(2 * float(value), abs=1e-3), name


# ---- a run ----


TALKS = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": answer}]
         for i in range(40) for answer in ("yes", "no")]  # fmt: skip
FAST = ["--threads", "1", "--batch", "2", "--context", "48", "--validation", "0.2", "--layers-every", "0"]
FAST += ["--precision", "fp32"]  # a model that has learnt nothing prefers nothing, to the last bits
LEARN = ["--lr", "0.003", "--steps", "12", "--eval-every", "6", "--save-every", "4"]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that says yes as often as no, and the wish that it says no. It had dropout when it learnt to."""
    folder = tmp_path_factory.mktemp("asked")
    talks = folder / "talks.jsonl"
    talks.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    wishes = [
        {"prompt": [talk[0]], "chosen": [TALKS[i + 1][1]], "rejected": [talk[1]]}
        for i, talk in enumerate(TALKS)
        if not i % 2
    ]
    file = written(folder, *wishes)[0]
    options = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    options += ["--set", "dropout=0.05", "--steps", "30", "--lr", "0.01", "--tokenizer", "byte"]
    options += ["--chat", talks, "--out", folder / "source"]
    assert bitnet("train", *options, *FAST) == 0
    return folder / "source", file


@pytest.mark.parametrize("more", [[], ["--lora", "4", "--lr", "0.02"]], ids=["all weights", "adapters"])
def test_preferences_are_learnt_and_exported(
    more: list[str], asked: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = asked
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = ["finetune", source, "--preference", file, *FAST, *LEARN, *more]
    assert bitnet(*command, "--out", whole) == 0
    records = losses(whole)
    first = next(record for record in records if "loss" in record)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["margin"]) < 1e-5  # of itself: fp32 sums
    before = next(record["start"] for record in records if "start" in record)
    assert before["nats_per_pair"] == pytest.approx(math.log(2), abs=1e-6) and before["accuracy"] == 0.5
    assert " nats/pair " in page.summary(whole, records)["training loss"]
    after = records[-1]["validation"]
    assert after["accuracy"] == 1 and after["margin"] > 0.2 and after["nats_per_pair"] < 0.6
    killed_before(6, *command, "--out", killed)
    assert bitnet("finetune", "--resume", "--out", killed) == 0
    assert bits(killed / "step-000012") == bits(whole / "step-000012") and losses(killed) == records

    capsys.readouterr()
    assert bitnet("eval", whole, "--json") == 0
    assert json.loads(capsys.readouterr().out)["margin"] == pytest.approx(after["margin"], abs=1e-6)
    assert bitnet("eval", whole, "--context", "4") == 1
    assert "no held-out pair fits --context 4; raise it" in capsys.readouterr().err
    export_checkpoint(whole, tmp_path / "m.bitnet", tokens=256)
    if more:
        return
    checkpoint = Checkpoint.open(whole)
    words = checkpoint.words
    words.encode_special_tokens = True
    template, generation = with_template(words, checkpoint.template, checkpoint.generation)
    encoder = Encoder(words, template, generation)
    how = preferences.Spelling(words, tokenizer.END_ID, generation["eos_token_ids"][0], encoder)
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as engine:
        for each in list(preferences.read([file]))[:10]:
            assert said(engine, how.pair(each)[0]) > said(engine, how.pair(each)[1])


def test_in_bf16_too_a_model_that_has_learnt_nothing_prefers_nothing(asked: tuple[Path, Path], tmp_path: Path) -> None:
    """The reference is computed as the steps compute, so that their roundings cancel."""
    source, file = asked
    once = [*FAST, "--precision", "bf16", "--lr", "0.003", "--steps", "1"]
    assert bitnet("finetune", source, "--preference", file, *once, "--out", tmp_path / "run") == 0
    first = next(record for record in losses(tmp_path / "run") if "loss" in record)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["margin"]) < 1e-5


def said(engine: Model, text: packing.Dialogue) -> float:
    """Log-probability of an answer, in the engine."""
    asked = int(text.counts.argmax())
    with engine.session() as session:
        session.feed(text.ids[:asked].tolist())
        return math.fsum(session.score(text.ids[asked:].tolist()))


def test_what_a_run_needs(asked: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = asked[0], tmp_path / "run"
    file = tmp_path / "with_a_long_one.jsonl"
    long = {"prompt": "x" * 40, "chosen": "y" * 15, "rejected": "z"}
    file.write_text(asked[1].read_text() + f"{json.dumps(long)}\n{json.dumps(long | {'prompt': 'w' * 40})}\n")
    command = ["finetune", source, "--preference", file, *FAST, "--out", run]

    def refused(*words: object) -> str:
        assert bitnet(*words) == 1
        return capsys.readouterr().err

    assert "both --data and --preference are given" in refused(*command, "--data", file)
    assert "--distill does not go with --preference" in refused(*command, "--distill", "0.5")
    assert "--quantize-warmup does not go with --preference" in refused(*command, "--quantize-warmup", "0.5")
    assert "the source is a full-precision model" in refused(*command, "--set", "ternary=[]")
    assert "preference is an option of `bitnet finetune`" in refused("train", "--config", _toml(tmp_path, file))
    assert "no held-out pair fits --context 4" in refused(*command, "--context", "4")
    assert not run.exists()
    assert bitnet(*command, "--steps", "2") == 0
    assert " pairs are longer than 48 tokens and left out; see --context" in capsys.readouterr().err
    more = ["finetune", "--resume", "--out", run, "--steps", "3"]
    assert "has no numbers for the longest pairs" in refused(*more, "--context", "64")
    (kept,) = run.glob("train-*.reference")
    bytes_before = kept.read_bytes()
    kept.write_bytes(bytes_before[:-1] + b"x")
    assert "is damaged; remove it, and it is computed again" in refused(*more)
    kept.unlink()
    assert "has lost the reference of the model before training, and" in refused(*more, "--context", "64")
    assert not kept.exists()
    assert bitnet(*more) == 0
    assert kept.read_bytes() == bytes_before
    assert bitnet("finetune", "--from", run, "--out", tmp_path / "branch", "--steps", "4") == 0


def _toml(folder: Path, file: Path) -> Path:
    (folder / "c.toml").write_text(f'[train]\npreference = ["{file}"]\n')
    return folder / "c.toml"
