"""Figures that the docs take from benchmarks/results are the ones there, rounded; limits are those of the code."""

from __future__ import annotations

import importlib
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
TABLES = [  # page, what the first line of the table begins with, pages of results
    (
        "README.md",
        "| | here | compared with |",
        ("scaling", "qat_gap-1m", "vs_llama_cpp-bitnet-2b4t", "peers-ik_llama.cpp"),
    ),
    ("docs/performance.md", "| | threads | here | of the limit |", ("vs_llama_cpp-bitnet-2b4t",)),
    ("docs/performance.md", "| | here | llama.cpp |", ("vs_llama_cpp-bitnet-2b4t",)),
    ("docs/performance.md", "| beside ik_llama.cpp |", ("peers-ik_llama.cpp",)),
    ("docs/performance.md", "| with AMX | threads |", ("peers-ik_llama.cpp-amx",)),
    (
        "docs/performance.md",
        "| | threads | tok/s | of the limit |",
        ("passes", "passes-images", "passes-1-thread", "passes-int8", "passes-int8-1-thread"),
    ),
    (
        "docs/processors.md",
        "| | 1 thread | `int8` | 2 threads | `int8` |",
        ("passes-intel", "passes-intel-1-thread", "passes-intel-int8", "passes-intel-int8-1-thread"),
    ),
    ("docs/processors.md", "| two cores with AMX |", ("passes-amx", "passes-amx-vnni")),
    ("docs/performance.md", "| here | with int8 keys and values |", ("towers",)),
    ("docs/performance.md", "| | 2 bits | 1.6 bits |", ("engine-bitnet-2b4t",)),
    ("docs/why-fast.md", "| texts at once, 2B4T", ("engine-bitnet-2b4t",)),
    ("docs/train.md", "| width | fp32: full precision |", ("training_speed",)),
    ("docs/train.md", "| width | bf16: full precision |", ("training_speed",)),
    ("docs/train.md", "| width 256 | full precision |", ("training_speed",)),
    ("docs/train.md", "| trainer | nats a token |", ("versus_trainers",)),
    ("docs/experts.md", "| nats a token |", ("experts",)),
    ("docs/images.md", "| | right caption of a picture |", ("image_gap",)),
    ("docs/gpu.md", "| model | | tokens/s |", ("gpu",)),
    ("docs/scaling.md", "| parameters | tokens | full precision |", ("scaling",)),
    ("docs/scaling.md", "| parameters, larger text |", ("scaling-10m",)),
    ("docs/precision.md", "| | parameters | MB | best rate |", ("qat_gap-1m", "qat_gap-3m")),
    ("docs/own-code.md", "| | bits per byte |", ("own_code",)),
    ("docs/precision.md", "| change | nats per token |", ("recipe",)),
    ("docs/precision.md", "| the weights turn ternary | 250,000", ("recipe-when",)),
    ("docs/server.md", "| clients | 1 | 2 |", ("serving-bitnet-2b4t", "serving-2m")),
]
COMMANDS = [  # page, script, page of results
    ("docs/precision.md", "qat_gap", "qat_gap-1m"),
    ("docs/precision.md", "recipe", "recipe"),
    ("docs/train.md", "versus_trainers", "versus_trainers"),
]
"""Commands that a page shows for its figures, which depend on the tokens that models learn from."""
OF_THEIR_OWN = {"50,000", "128", "224", "256"}
"""How much was measured, and what no page of results has."""


def numbers(text: str) -> list[str]:
    text = re.sub(r"(?<![\d,.])((?:\d\.?){3,}) million", lambda amount: f"{float(amount[1]) * 1e6:,.0f}", text)
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)


def rows(page: str, begins: str) -> str:
    """All rows of a table but the first."""
    assert page.count(begins) == 1, f"{page.count(begins)} tables begin with {begins!r}"
    return page[page.index(begins) :].partition("\n\n")[0].partition("\n")[2]


def is_rounding_of(shown: str, found: list[float]) -> bool:
    digits = shown.replace(",", "")
    value, places = float(digits), len(digits.partition(".")[2])
    zeros = len(digits) - len(digits.rstrip("0")) if value >= 10_000 else 0  # 61,900
    return any(abs(each - value) <= 0.5000001 * 10.0 ** (zeros - places) for each in found)


@pytest.mark.parametrize(("name", "begins", "results"), TABLES)
def test_figures_are_those_of_the_results(name: str, begins: str, results: tuple[str, ...]) -> None:
    """Figures of three digits or more: shorter ones would be found anywhere."""
    texts = [(RESULTS / f"{each}.md").read_text(encoding="utf-8") for each in results]
    found = [float(number.replace(",", "").rstrip(",")) for text in texts for number in numbers(text)]
    shown = [number.rstrip(",") for number in numbers(rows((ROOT / name).read_text(encoding="utf-8"), begins))]
    exact = [number for number in shown if len(re.sub(r"\D|^0\.0*", "", number)) >= 3 and "e" not in number]
    wrong = [number for number in exact if number not in OF_THEIR_OWN and not is_rounding_of(number, found)]
    assert exact and not wrong, f"{name} has {wrong}, which {', '.join(results)} have not"


@pytest.mark.parametrize(("name", "script", "results"), COMMANDS)
def test_a_command_of_a_page_is_that_of_its_figures(name: str, script: str, results: str) -> None:
    pattern = rf"python benchmarks/{script}\.py\b[^`#\n]* --tokens (\d+)"
    shown, made = (re.search(pattern, path.read_text()) for path in (ROOT / name, RESULTS / f"{results}.md"))
    assert shown and made and shown[1] == made[1]


@pytest.mark.parametrize("name", ["qat_gap-1m", "qat_gap-1m-manuals", "qat_gap-3m", "conversion", "experts"])
def test_a_page_says_on_which_text_its_rates_are_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the one whose losses it reports; as the script writes it, and as it is here."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    said = "Rates are chosen and losses reported on the same validation text"
    assert said in importlib.import_module(name.partition("-")[0]).markdown(results)
    assert said in (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_the_page_of_benchmarks_names_them_all() -> None:
    names = [path.name for path in (ROOT / "benchmarks").iterdir() if path.suffix in (".py", ".c")]
    named = re.findall(r"[\w*]+\.(?:py|c)\b", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"))
    assert [name for name in names if not any(fnmatch(name, each) for each in named)] == []


LIMITS = [
    ("convert", "| Q8_0, F16 or F32 (`--head`) |", "bitnet_cli/verbs/convert.py", '.get(args.head, "Q8_0")'),
    ("data", "The share is from 0.5 to 1.", "bitnet_cli/verbs/tokenize.py", "0.5 <= args.near_duplicates <= 1"),
    ("drafts", "a vocabulary of 65,536 tokens or more", "runtime_c/src/session/guess.c", "LEAST = 32768"),
    ("encoders", "RoBERTa and XLM-RoBERTa with", "export/bitnet_export/foreign/hf/families.py", '"XLMRobertaModel"'),
    ("families", "RoBERTa, XLM-RoBERTa |", "export/bitnet_export/foreign/hf/families.py", '"XLMRobertaModel"'),
    ("finetune", "RoBERTa, XLM-RoBERTa |", "export/bitnet_export/foreign/hf/families.py", '"XLMRobertaModel"'),
    ("precision", "`--set ternary=[] --set head_format=f32`", "benchmarks/qat_gap.py", '{"ternary": [], "head_format"'),
    ("python", "64 MB and 16 bytes for each byte", "python_bindings/bitnet_runtime/chat/template.py", "\nBYTES = 16 "),
    ("server", "new requests wait after 30 seconds", "python_bindings/bitnet_serve/models/shelf.py", "\nAGAIN = 30.0 "),
    ("server", "| headers | 10 seconds |", "python_bindings/bitnet_serve/protocol.py", "\nHEADERS = 10.0 "),
    ("server", "| 128; 384 that", "python_bindings/bitnet_serve/protocol.py", "\nMOST_SLOW = 128 "),
    ("server", "of up to 2,048 texts", "python_bindings/bitnet_serve/endpoints/embeddings.py", "\nMOST_TEXTS = 2048\n"),
    ("server", "kept for a while: up to 16,", "python_bindings/bitnet_serve/models/sessions.py", "\nMOST = 16 "),
    ("server", "a quarter of `--max-cache`", "python_bindings/bitnet_serve/application.py", "0.25 * options.reuse"),
    ("server", "models with `mask=prefix` are", "python_bindings/bitnet_serve/models/sessions.py", '.mask != "causal"'),
    ("several-machines", '`{"prompt": "…"}` gets a `text`', "python_bindings/examples/ray_batch.py", '{"prompt": "…"}'),
    ("tools", "At most 128 tools", "python_bindings/bitnet_runtime/chat/tools.py", "\nMOST = 128 "),
    ("tools", "at most 16 calls", "python_bindings/bitnet_runtime/chat/dialects.py", "\nTOGETHER = 16 "),
    ("train", "no other file.", "export/bitnet_export/packed/replacing.py", "exists and {what}"),
    ("watch", "more than 200 million", "bitnet/report/output.py", "\nLARGEST = 200_000_000 "),
    ("why-fast", "are more than 256 together", "runtime_c/src/screen.h", "BN_SCREEN_MOST = 256 "),
]
"""Page, what it says, and where the code has it: whoever changes one has to look at the other."""


@pytest.mark.parametrize(("name", "told", "source", "code"), LIMITS)
def test_limits_on_the_pages_are_those_of_the_code(name: str, told: str, source: str, code: str) -> None:
    page, program = ((ROOT / path).read_text(encoding="utf-8") for path in (f"docs/{name}.md", source))
    assert told in " ".join(page.split()) and code in program
