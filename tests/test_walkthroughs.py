"""The pages of docs/ from top to bottom: what they show is run, on a model so small that it takes seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from bitnet.data import drawn
from bitnet_export import random_model
from docs_text import Block, blocks, commands_of
from image_models import IMAGE, VOCAB, packed
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, scripted_model
from test_image_prompts import PARTS
from thinker_reference import Thinker
from training import TINY, bitnet
from vision_models import PALIGEMMA, TOWERS

ROOT = Path(__file__).parent.parent
PAGES = ("README", "docs/train", "docs/watch", "docs/evaluate", "docs/finetune", "docs/convert", "docs/onnx")
PAGES += (
    "docs/command-line",
    "docs/python",
    "docs/structured",
    "docs/receipts",
    "docs/performance",
    "docs/several-machines",
    "docs/images",
)

TINY_THINKER = {
    "vocab_size": 61, "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 24, "ctx_len": 64, "rope_theta": 10_000,
    "use_swiglu": True, "use_gqa": False, "use_moe": False,
}  # fmt: skip
NOT_HERE = (
    "--tasks",  # downloads
    "--shape bitnet-2b4t",  # takes minutes
    "Qwen3", "bitnet-b1.58", "siglip-base", "siglip-so400m", "paligemma-3b", "FILE.gguf",  # published models
    "bitnet serve",  # runs until it is stopped; tests/test_serve_command.py follows its page
    "model.bitnet mine.gguf",  # the end of that page does it with a model that can
)  # fmt: skip

WITH_SHAPE = {"gguf", "siglip-tiny", "paligemma-tiny"}  # presets whose shape is what the page is about

GONE_ON = {"3000": "22", "runs/long/step-001000": "runs/long/step-000010", "1400": "14"}

SMALLER = {
    "export": ["--tokens", "200"],
    "convert": ["--tokens", "64"],
    "finetune": ["--steps", "2", "--batch", "2", "--threads", "1"],
    "report": ["--tokens", "8"],
    "bench": ["--prompt", "8", "--gen", "8", "--repeat", "1"],
}


@pytest.fixture(scope="module")
def workshop(finished: Path, sentences: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name and do not make."""
    folder = tmp_path_factory.mktemp("workshop")
    for text in ("my_text", "my_code"):
        shutil.copytree(sentences, folder / text)
    for run in ("runs/mine", "runs/tiny"):
        shutil.copytree(finished, folder / run)
    (folder / "build/demo").mkdir(parents=True)
    assert bitnet("export", finished, folder / "model.bitnet", "--tokens", "64") == 0
    shutil.copy(folder / "model.bitnet", folder / "build/demo/model.bitnet")
    assert bitnet("convert", folder / "model.bitnet", folder / "FOLDER", "--to", "hf") == 0
    tokenizer = byte_tokenizer().to_str().encode()
    random_model(SMALL.replace(pooling="last"), folder / "embedding.bitnet", tokenizer=tokenizer)
    encoder = SMALL.replace(pooling="mean", mask="bidirectional", has_head=False, tie_embeddings=False)
    random_model(encoder, folder / "vectors.bitnet", tokenizer=tokenizer)
    scripted_model(folder / "assistant.bitnet", [b"Four", b"."], template=TEMPLATE)
    (folder / "prompt.txt").write_text("the cat")
    (folder / "answer.json").write_text('{"enum": ["yes", "no", "perhaps"]}')
    drawn.write(folder / "pictures", 40, seed=1)
    packed(folder / "siglip.bitnet", TOWERS.replace(vocab_size=VOCAB))
    sees = PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE)
    packed(folder / "answers.bitnet", sees, template=PARTS)
    thinker = Thinker(TINY_THINKER)
    (folder / "checkpoints/thinker_tiny").mkdir(parents=True)
    (folder / "checkpoints/thinker_tiny/config.json").write_text(json.dumps(TINY_THINKER))
    torch.save(thinker.state_dict(), folder / "checkpoints/thinker_tiny/thinker.pt")
    turns = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "the cat"}]}\n'
    (folder / "talks.jsonl").write_text("".join(turns % i for i in range(8)))
    wish = '{"prompt": "%d", "chosen": "the cat", "rejected": "a dog"}\n'
    (folder / "wishes.jsonl").write_text("".join(wish % i for i in range(8)))
    return folder


def smaller(command: str) -> list[str]:
    """The words behind `bitnet` of a command that does less of the same."""
    verb, *words = shlex.split(command)[1:]
    if verb == "train" and {"--resume", "--from"} & set(words):
        return [verb, *(GONE_ON.get(word, word) for word in words)]
    words = shlex.split(re.sub(r"--(preset tiny|minutes \S+|tokens-per-parameter \S+)", "", shlex.join(words)))
    if verb == "train":
        words += [] if "--data" in words else ["--data", "my_text"]  # in place of the standard library
        of_preset = ["--steps", "2", "--batch", "2", "--threads", "1"]
        return [verb, *words, *(of_preset if WITH_SHAPE & set(words) else TINY)]
    if "--to" in words:
        return [verb, *words]
    if verb == "eval" and "--data" in words:
        return [verb, *words, "--tokens", "300"]
    return [verb, *words, *SMALLER.get(verb, [])]


def make_room(words: list[str]) -> None:
    """Remove the run that a page makes itself, which others find in the workshop."""
    if words[0] in ("train", "finetune") and "--resume" not in words:
        shutil.rmtree(words[words.index("--out") + 1] if "--out" in words else "none", ignore_errors=True)


def shown(name: str) -> list[Block]:
    return [block for block in blocks((ROOT / f"{name}.md").read_text(encoding="utf-8")) if block.fenced]


@pytest.mark.usefixtures("bench_here", "no_figures")
@pytest.mark.parametrize("name", PAGES)
def test_the_page_from_top_to_bottom(
    name: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(workshop, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    ran = 0
    for command in [command for block in shown(name) for command in commands_of(block)]:
        if not command.startswith("bitnet ") or any(each in command for each in NOT_HERE):
            continue
        command, _, file = command.partition(" < ")
        words = smaller(command)
        make_room(words)
        with open(file or os.devnull, encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = bitnet(*words)
        printed = capsys.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{printed.out}{printed.err}"
        ran += 1
    for block in shown(name):
        if block.language == "python":
            exec(compile(block.text, name, "exec"), {"__name__": name})
            ran += 1
    assert ran, "nothing on this page was run"
