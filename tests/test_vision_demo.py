"""`make vision` from the first picture to the page, with models that have no time to learn anything."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import bitnet_cli
from bitnet.data import drawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python_bindings" / "examples"))
demo = importlib.import_module("vision")

TINY = ["dim=32", "n_layers=1", "n_heads=1", "n_kv_heads=1", "ffn_dim=64"]
SMALLER = {
    "train": ["--batch", "8", "--validation", "0.2", "--threads", "1", "--layers-every", "0"],
    "export": ["--tokens", "400"],
}
PICTURES, UNSEEN = 40, 14


@pytest.mark.parametrize("name", ["demo", "vision"])
def test_examples_say_what_their_argument_is(name: str) -> None:
    file = Path(demo.__file__).with_name(f"{name}.py")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("expected one argument, the ")


def commands(folder: Path) -> list[list[str]]:
    """What `make vision` does, in another folder."""
    made = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/demo", "vision", "LOOKING=0.005", "ANSWERING=0.005"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = made.stdout.replace("\\\n", " ").replace("build/vision", str(folder)).splitlines()
    return [shlex.split(line) for line in lines]


def smaller(words: list[str]) -> list[str]:
    """A command of `bitnet` that takes a moment."""
    towers = "siglip-tiny" in words
    shape = [f"{stack}{field}" for stack in ("", "vision.") for field in TINY if towers or not stack]
    options = [*shape, *["out_dim=32"] * towers] if words[0] == "train" else []
    return [*words, *SMALLER.get(words[0], []), *(word for option in options for word in ("--set", option))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it leaves."""
    folder = tmp_path_factory.mktemp("demo") / "vision"
    verbs = []
    for program, *words in commands(folder):
        verbs.append(words[0])
        if program.endswith("bitnet"):
            assert bitnet_cli.main(smaller(words)) == 0
        elif words[:2] == ["-m", "bitnet.data.drawn"]:
            n = words.index("--n") + 1
            words[n] = str(UNSEEN if "--held-out" in words else PICTURES)
            assert drawn.main(words[2:]) == 0
        elif program.endswith("python"):
            demo.main(Path(words[1]))
        else:
            assert (program, words) == ("rm", ["-rf", str(folder)])
    assert verbs == ["-rf", "-m", "-m", "train", "train", "export", "export", "similarity", "generate", words[0]]
    return folder


def test_the_page_needs_no_other_file(made: Path) -> None:
    page, asked = (made / "vision.html").read_text(), demo.records(made / "unseen" / "questions.jsonl")
    assert not re.search(r"(?i)https?:|<script|<link|@import|url\(", page)
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == UNSEEN + min(UNSEEN, 12) and all(s.startswith("data:image/png;base64,") for s in sources)
    assert page.count('<td class="right">') + page.count('<td class="wrong">') == len(asked)
    assert all(record["prefix"] in page for record in asked)
    assert len(re.findall(r'<td class="best (right|wrong)"', page)) == 12


def test_the_command_line_answers_as_python_does(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a temperature, as an untrained model answers everything alike."""
    record = demo.records(made / "unseen" / "questions.jsonl")[0]
    image, prompt = made / "unseen" / record["image"], record["prefix"]
    with demo.Model.load(made / "paligemma.bitnet") as model:
        said = model.generate(prompt, images=[image], max_tokens=12, temperature=1.0, seed=3).tokens
    words = ["generate", made / "paligemma.bitnet", "--image", image, "-p", prompt, "--quiet", "--json"]
    assert bitnet_cli.main([*map(str, words), "--temperature", "1", "-s", "3", "-n", "12"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == said
    assert said


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = demo.np.array([[3, 1, 2], [0, 5, 9], [1, 2, 8]], demo.np.float32)
    matched = demo.Matched(["a", "b", "c"], ["x", "y", "z"], scores)
    assert matched.recall == pytest.approx((2 / 3, 2 / 3))  # b is nearer to z; z is nearer to b
    asked = [
        demo.Asked("a", question, "right", said)
        for question, said in (
            ("what is in the picture?", "right"), ("what does it say?", "wrong"), ("what colour is the ring?", "right"),
            ("how many rings are there?", "wrong"), ("where is the ring?", "right"), ("what is red?", "right"),
            ("what is above the ring?", "wrong"), ("is there a red ring?", "right"),
        )
    ]  # fmt: skip
    assert {kind.what: (kind.right, kind.of) for kind in demo.kinds(asked)} == {
        "describes the picture": (1, 1), "reads": (0, 1), "colours": (1, 1), "numbers": (0, 1), "places": (1, 1),
        "names": (0.5, 2), "yes or no": (1, 1),
    }  # fmt: skip
    monkeypatch.setattr(demo, "RECORDED", tmp_path / "image_gap.json")
    assert [str(figure) for figure in demo.figures(matched, asked)] == ["66.7% of 3", "66.7% of 3", "62.5% of 8"]
    row: dict[str, Any] = {"variant": "full"} | {name: {"mean": 0.5} for name in ("recall", "recall_back", "accuracy")}
    demo.RECORDED.write_text(json.dumps({"rows": [{"variant": "ternary"}, row]}))
    assert str(demo.figures(matched, asked)[2]) == "62.5% of 8 (full precision: 50.0%)"


def test_c_answers_and_compares_as_python_does(made: Path, tmp_path: Path) -> None:
    """The example of the manual, with a portable build of the engine."""
    runtime, program = ROOT / "runtime_c", tmp_path / "image"
    sources = [runtime / "examples" / "image.c", *runtime.glob("src/**/*.c")]
    flags = ["-O1", "-ffp-contract=off", f"-I{runtime / 'include'}", f"-I{runtime / 'src'}", "-lm", "-lpthread"]
    subprocess.run([os.environ.get("CC", "cc"), *sources, *flags, "-o", program], check=True)

    def said(model: Path, record: dict[str, str], count: int, ids: list[int]) -> list[str]:
        Image.open(made / "unseen" / record["image"]).save(tmp_path / "seen.ppm")
        words = [str(word) for word in (program, model, tmp_path / "seen.ppm", count, *ids)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()

    records = demo.records(made / "unseen" / "questions.jsonl")[:3]
    with demo.Model.load(made / "paligemma.bitnet") as model:
        for record in records:
            seen = made / "unseen" / record["image"]
            answer = model.generate(record["prefix"], images=[seen], max_tokens=9, temperature=0).tokens
            ids = model.tokenize(record["prefix"] + "\n")  # the example knows no end token
            assert said(made / "paligemma.bitnet", record, len(answer), ids) == [str(token) for token in answer]
    with demo.Model.load(made / "siglip.bitnet") as model:
        for record in records:
            text = model.tokenize(record["prefix"])
            fits = float(model.similarity(made / "unseen" / record["image"], [text])[0, 0])
            (found,) = said(made / "siglip.bitnet", record, 0, text)
            # fp32 sums in another order, times the scale; six digits are printed
            assert abs(float(found) - fits) < 1e-4
