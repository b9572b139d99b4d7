"""`bitnet` from Python: whole runs, and training loops of one's own."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

import bitnet as package
import bitnet_export
from bitnet import BitLinear, ModelConfig, Transformer, fit, load, save
from bitnet.data import tokenizer
from bitnet.train import loop, saving
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import export_checkpoint
from bitnet_runtime import Model
from docs_text import blocks
from training import MODEL, TINY, bitnet, bits, losses

torch.set_num_threads(1)

OPTIONS = {"threads": 1, "batch": 4, "eval_every": 10, "save_every": 10, "layers_every": 5}
SIZES = {name: int(value) for name, value in (option.split("=") for option in (*MODEL, "max_context=32"))}
CONFIG = ModelConfig(
    vocab_size=257, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=32,
)  # fmt: skip
WORDS = tokenizer.build("byte", [], 257)


def test_a_run_is_that_of_the_command_line(sentences: str, tmp_path: Path) -> None:
    assert bitnet("train", "--data", sentences, "--out", tmp_path / "typed", *TINY) == 0
    half = fit(data=Path(sentences), out=tmp_path / "called", steps=10, model=SIZES, schedule="constant", **OPTIONS)
    assert half.checkpoint == tmp_path / "called/step-000010" and half.validation is not None
    outcome = fit(data=[sentences], out=str(tmp_path / "whole"), steps=20, model=SIZES, **OPTIONS)
    assert outcome.signal == 0 and outcome.reached["step"] == 20
    assert bits(tmp_path / "whole/step-000020") == bits(tmp_path / "typed/step-000020")
    assert losses(tmp_path / "whole") == losses(tmp_path / "typed")
    more = fit(out=tmp_path / "called", resume=True, steps=12)
    assert more.reached["step"] == 12
    tuned = fit(source=tmp_path / "whole", out=tmp_path / "tuned", steps=1, threads=1, batch=2)
    assert tuned.checkpoint == tmp_path / "tuned/step-000001"


def test_a_run_in_another_thread(sentences: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(fit, data=sentences, out=tmp_path / "run", steps=2, model=SIZES, threads=1, batch=4)
    assert run.result().reached["step"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stpes": 3}, "unknown training option 'stpes', did you mean 'steps'"),
        ({"steps": "3"}, "steps is '3', expected a whole number"),
        ({"model": {"dmi": 3}}, "dmi"),
        ({"model": {"dim": 63, "head_dim": 31}}, "rope_dim is 31"),
        ({"model": ["dim=3"]}, "expected a dictionary of options"),
        ({"data": ""}, "data has an empty name"),
        ({"tasks": "arc_easy"}, "tasks are evaluated by `bitnet train`"),
        ({"resume": True}, "nothing to resume"),
        ({"branch": "none", "resume": True}, "give one of them"),
        ({"data": [1]}, "data has 1, expected strings"),
        (
            {"data": {"text": ["a"]}},
            "data is {'text': .'a'.}, expected a list of files, folders, globs or hf:NAME",
        ),
        ({"chat": [{"messages": []}]}, "chat has {'messages': ..}, expected strings"),
        ({"config": {}}, "config is {}, expected a path"),
        ({"branch": 5}, "branch is 5, expected a path"),
        ({"preset": 5}, "preset is 5, expected a string"),
        ({"model": {"ternary": {"q"}}}, "model has ternary = {'q'}, expected a number, a string, or a list"),
    ],
)
def test_what_a_run_cannot_follow(options: dict[str, Any], said: str, sentences: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        fit(**{"data": sentences, "out": tmp_path / "run"} | options)
    assert not (tmp_path / "run").exists()


def test_a_model_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, folder = Transformer(CONFIG), tmp_path / "some runs" / "own"
    assert save(model, WORDS, folder) == folder
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "manifest.json",
    }  # fmt: skip
    other, words = load(folder)
    tokens = torch.arange(30)[None] % 257
    assert torch.equal(other(tokens), model.eval()(tokens)) and words.to_str() == WORDS.to_str()
    export_checkpoint(folder, tmp_path / "own.bitnet", tokens=100)
    with Model.load(tmp_path / "own.bitnet", threads=1) as packed:
        assert packed.generate("abc", max_tokens=4, temperature=0).tokens
    save(Transformer(CONFIG), WORDS, folder)
    assert not torch.equal(load(folder)[0](tokens), model(tokens))
    assert [path.name for path in folder.parent.iterdir()] == ["own"]  # no temporary files are left
    assert bitnet("finetune", folder, "--out", tmp_path / "tuned", "--data", __file__, "--steps", 1, "--batch", 2) == 0


def test_a_model_of_vectors_is_saved_with_an_empty_tokenizer_and_exported(tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": 0, "tie_embeddings": False, "has_head": False, "pooling": "mean"}
    model = Transformer(ModelConfig(**sizes, input="embeddings", mask="bidirectional"))
    folder = save(model, Tokenizer(models.BPE()), tmp_path / "own")
    report = export_checkpoint(folder, tmp_path / "own.bitnet", tokens=100)
    assert report.text == "random tokens (the tokenizer gives none)"
    vectors = np.random.default_rng(0).standard_normal((1, 5, model.config.dim), np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(vectors)).numpy()
    with Model.load(tmp_path / "own.bitnet", threads=1, kv_type="f32") as engine, engine.session() as session:
        found = session.embed_embeddings(vectors[0])
    assert np.abs(found - wanted / np.linalg.norm(wanted)).max() < 1e-4


def test_what_a_model_answers_with_goes_along(tmp_path: Path) -> None:
    model, said = Transformer(CONFIG), {"eos_token_ids": [7], "temperature": 0.5}
    optimizer, state = torch.optim.AdamW(model.parameters()), {"step": 0, "tokens": 0}
    chatting = saving.write(
        tmp_path / "run", saving.Snapshot.of(model, WORDS.to_str(), optimizer, state, "{{ messages }}", said)
    )
    save(model, WORDS, tmp_path / "own", like=chatting)
    found = Checkpoint.open(tmp_path / "own")
    assert (found.template, found.generation) == ("{{ messages }}", said)
    save(model, WORDS, tmp_path / "own")
    found = Checkpoint.open(tmp_path / "own")
    assert (found.template, found.generation) == (None, {})
    others = Tokenizer(models.WordLevel({f"word {i}": i for i in range(CONFIG.vocab_size)}, "word 0"))
    with pytest.raises(ValueError, match=r"token 7 is .* in .*, 'word 7' here; give the tokenizer of that run"):
        save(model, others, tmp_path / "own", like=chatting)


def test_a_layer_alone() -> None:
    layer, x = BitLinear(16, 8), torch.randn(3, 16)
    assert layer(x).shape == (3, 8) and torch.equal(layer(x[1]), layer(x)[1])
    for wrong in (torch.randn(3, 15), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x has shape \[.*\], expected \(\.\.\., 16\)"):
            layer(wrong)


def test_what_cannot_be_saved(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    model = Transformer(CONFIG)
    (tmp_path / "published").mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / "published" / name).write_text("theirs")
    places = [tmp_path / name for name in ("mine", "published")]
    with pytest.raises(ValueError, match="is a file, expected the name of a folder to write"):
        save(model, WORDS, tmp_path / "mine/letter.txt")
    for held in (*places, finished, finished / "step-000020"):
        with pytest.raises(ValueError, match="which `save` did not write; name a new folder"):
            save(model, WORDS, held)
    with pytest.raises(
        ValueError, match=r"model is of <class '.*Linear'>, expected bitnet.model.transformer.Transform"
    ):
        save(torch.nn.Linear(2, 2), WORDS, tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokenizer is of <class 'str'>, expected tokenizers.Tokenizer"):
        save(model, "byte", tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the tokenizer needs 257 tokens, the model has 200"):
        save(Transformer(CONFIG.replace(vocab_size=200)), WORDS, tmp_path / "new")
    with torch.no_grad():
        model.layers[1].q.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.q\.weight holds NaN or infinity, not saved"):
        save(model, WORDS, tmp_path / "new")
    other = Transformer(CONFIG)
    other.probe = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"probe\.bias is \[3\] in the model and missing in one of its configuration"):
        save(other, WORDS, tmp_path / "new")
    with torch.no_grad():
        other = Transformer(CONFIG).double()
        other.layers[0].k.weight[0, 0] = 1e300
    with pytest.raises(ValueError, match=r"layers\.0\.k\.weight holds NaN or infinity"):
        save(other, WORDS, tmp_path / "new")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="is the current folder"):
        save(Transformer(CONFIG), WORDS, ".")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "published", "here"}
    assert {path.read_text() for path in (tmp_path / "published").iterdir()} == {"theirs"}


def test_a_compiled_model_behind_a_link_is_saved_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk")
    model = Transformer(CONFIG)
    words = Tokenizer.from_str(WORDS.to_str())
    words.enable_truncation(8)
    compiled: Any = torch.compile(model, backend="eager")  # a module, which its type does not say
    for _ in range(2):
        save(compiled, words, tmp_path / "latest")
        assert (tmp_path / "latest").is_symlink()
    found, read = load(tmp_path / "disk")
    assert found.state_dict().keys() == model.state_dict().keys() and read.truncation is None
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "latest"}


def test_a_save_that_was_killed(tmp_path: Path) -> None:
    """Between its two renames."""
    first, second = Transformer(CONFIG), Transformer(CONFIG)
    save(first, WORDS, tmp_path / "own")
    (tmp_path / "own").rename(tmp_path / ".own.replaced")
    assert torch.equal(
        load(tmp_path / "own")[0].state_dict()["embedding.weight"], first.state_dict()["embedding.weight"]
    )
    (tmp_path / "own").rename(tmp_path / ".own.replaced")
    save(second, WORDS, tmp_path / "own")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_was_saved_is_evaluated(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(Transformer(CONFIG), WORDS, tmp_path / "own")
    assert bitnet("eval", tmp_path / "own", "--data", sentences, "--tokens", 100) == 0
    assert bitnet("eval", tmp_path / "own") == 1
    assert (
        "state.json is missing, so what it learned from is not known; give text with --data" in capsys.readouterr().err
    )


def test_a_run_leaves_the_generators_as_they_were(sentences: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fit(data=sentences, out=tmp_path / "run", steps=np.int64(1), lr=np.float64(0.01), model=SIZES, threads=1, batch=4)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.plots
def test_a_run_leaves_threads_and_plots_as_they_were(sentences: str, tmp_path: Path) -> None:
    import matplotlib

    backend = matplotlib.get_backend()
    try:
        matplotlib.use("svg")
        torch.set_num_threads(2)
        fit(data=sentences, out=tmp_path / "run", steps=1, model=SIZES, threads=1, batch=4)
        assert torch.get_num_threads() == 2 and matplotlib.get_backend() == "svg"
        assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    finally:
        torch.set_num_threads(1)
        matplotlib.use(backend)


def test_a_run_that_is_stopped_says_where_it_is(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = loop.update

    def interrupted(run: loop.Run) -> object:
        if run.state["step"] == 2:
            signal.raise_signal(signal.SIGINT)
        return update(run)

    monkeypatch.setattr(loop, "update", interrupted)
    outcome = fit(data=sentences, out=tmp_path / "run", steps=9, model=SIZES, threads=1, batch=4)
    assert (outcome.signal, outcome.checkpoint) == (signal.SIGINT, tmp_path / "run/step-000003")
    assert outcome.reached["step"] == 3


def test_names() -> None:
    assert {"fit", "load", "save", "Transformer", "BitLinear"} <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Trainer', expected one of PRESETS, BitLinear"):
        _ = package.Trainer


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitnet.bitlinear", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bitnet-edge\[train\]'"):
        _ = package.BitLinear


def test_the_page(sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/train-python.md from top to bottom, its first run made smaller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text").symlink_to(sentences)
    page = (Path(__file__).parent.parent / "docs/train-python.md").read_text(encoding="utf-8")
    ran = [block.text for block in blocks(page) if block.language == "python"]
    assert "steps=200" in ran[0]
    ran[0] = ran[0].replace("steps=200", "steps=2, batch=2, threads=1")
    for text in ran:
        exec(compile(text, "docs/train-python.md", "exec"), {})
    assert len(ran) == 5 and (tmp_path / "own.bitnet").is_file()
    assert [name for name in bitnet_export.__all__ if name not in page] == []
