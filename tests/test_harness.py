"""The engine in lm-evaluation-harness, against the harness's own class on the same model in transformers.

The tolerance is the staircase of int8 activations: two correct programs agree to about 1e-6 a token until one
activation falls on another step, and differ by about 3e-3 a token, 0.03 at worst, after that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import bitnet_cli
from bitnet.evaluate.engine_lm import EngineLM
from bitnet.harness import check_names, tasks_of
from bitnet_export import random_adapter
from bitnet_export.convert.incoming import convert
from bitnet_runtime import Model
from hf_models import falcon_masters
from runtime_models import SMALL, TEMPLATE, scripted_model, small_model

torch.set_num_threads(1)

SENTENCES = [
    "the cat sees a red house", "a dog runs to the house and back", "what does the dog see", "red and blue",
    "one two three four five six seven eight nine ten", "the answer is the cat", "question: who runs? answer:",
]  # fmt: skip
LENGTH = 64  # tokens of context; some requests are longer
WORST = 0.03  # nats a token, see above


def words(start: bool) -> Tokenizer:
    """A tokenizer of 301 tokens; start: a text begins with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=301, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if start:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["start token", "no start token"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, EngineLM]]:
    """The same random model in both."""
    folder = tmp_path_factory.mktemp("model")
    published = falcon_masters()
    published.save(folder / "hf")
    named = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if request.param else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(request.param), **named)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "model.bitnet", head="f32", tokens=64)
    theirs = HFLM(published.model, tokenizer=tokenizer, max_length=LENGTH, batch_size=1)
    with torch.compiler.set_stance("force_eager"):
        yield theirs, EngineLM(folder / "model.bitnet", max_length=LENGTH, batch_size=3, threads=1)


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def agree(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]], n_tokens: list[int]) -> None:
    difference = np.array([abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)]) / n_tokens
    assert difference.max() < WORST and np.median(difference) < 3e-3, difference
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


# ---- request by request ----


def test_scores_are_those_of_the_harness_in_transformers(pair: tuple[LM, EngineLM]) -> None:
    theirs, ours = pair
    requests = [(context, " " + other) for context in SENTENCES for other in SENTENCES[:3]]
    requests += [("", SENTENCES[0]), ("a space ", "at the end"), ("<s>the", " cat"), ("x", "</s>")]
    requests += [(" ".join(SENTENCES * 3), " red"), (" ".join(SENTENCES), " ".join(SENTENCES[:3]))]  # cut
    found = ours.loglikelihood(ask("loglikelihood", *requests), disable_tqdm=True)
    expected = theirs.loglikelihood(ask("loglikelihood", *requests), disable_tqdm=True)
    agree(found, expected, [len(ours.tok_encode(text, add_special_tokens=False)) for _, text in requests])


def test_the_likeliest_tokens_are_told_apart(pair: tuple[LM, EngineLM]) -> None:
    theirs, ours = pair
    requests: list[tuple[None, list[int], list[int]]] = []
    for text in SENTENCES:
        context = ours.tok_encode(text)
        made = theirs.model.generate(torch.tensor([context]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        likeliest = made[0, len(context) :].tolist()
        requests += [(None, context, likeliest), (None, context, [*likeliest[:2], 5])]
    found = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    agree(found, theirs._loglikelihood_tokens(requests, disable_tqdm=True), [3] * len(requests))
    assert {greedy for _, greedy in found} == {True, False}


def test_whole_texts(pair: tuple[LM, EngineLM]) -> None:
    theirs, ours = pair
    requests = ask("loglikelihood_rolling", *[(text,) for text in [*SENTENCES, " ".join(SENTENCES * 4)]])
    n_tokens = [len(theirs.tok_encode(request.args[0])) for request in requests]
    assert max(n_tokens) > 2 * LENGTH
    found, expected = ours.loglikelihood_rolling(requests, disable_tqdm=True), theirs.loglikelihood_rolling(requests)
    agree([(x, True) for x in found], [(x, True) for x in expected], n_tokens)


def test_a_text_is_encoded_alike(pair: tuple[LM, EngineLM]) -> None:
    theirs, ours = pair
    for text in [*SENTENCES, "", "<s>the cat", "a</s>b", "naïve 🙂"]:
        for special in (None, False):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), (text, special)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    assert (ours.max_length, theirs.max_length) == (LENGTH, LENGTH)


def test_greedy_answers(pair: tuple[LM, EngineLM]) -> None:
    """Word by word; after a rounding that decides between two words of nearly equal score the rest may differ."""
    theirs, ours = pair
    options = [{"until": ["e"], "max_gen_toks": 8}, {"until": "</s>", "max_gen_toks": 5}, {"max_gen_toks": 12}]
    requests = [(text, dict(options[i % 3])) for i, text in enumerate([*SENTENCES, " ".join(SENTENCES * 3)])]
    found = ours.generate_until(ask("generate_until", *requests), disable_tqdm=True)
    expected = theirs.generate_until(ask("generate_until", *requests), disable_tqdm=True)
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(found) - 1, (found, expected)


def test_what_is_shared_changes_nothing(pair: tuple[LM, EngineLM]) -> None:
    """Sorted, with one cache for all, and in batches: the same bits as each request alone."""
    _, ours = pair
    requests = ask("loglikelihood", *[(a, " " + b) for a in SENTENCES[:3] for b in SENTENCES])
    alone = [ours.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert ours.loglikelihood(requests, disable_tqdm=True) == alone
    assert ours.loglikelihood(requests[::-1], disable_tqdm=True) == alone[::-1]
    asked = ask("generate_until", *[(text, {"max_gen_toks": 6}) for text in SENTENCES])
    answers = [ours.generate_until([request], disable_tqdm=True)[0] for request in asked]
    assert ours.generate_until(asked, disable_tqdm=True) == answers


def test_few_logits_at_a_time_change_nothing(pair: tuple[LM, EngineLM], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair
    requests = ask("loglikelihood", (SENTENCES[0], " ".join(SENTENCES[:4])))
    whole = ours.loglikelihood(requests, disable_tqdm=True)
    monkeypatch.setattr(ours, "_block", 1)
    (score, greedy), *_ = ours.loglikelihood(requests, disable_tqdm=True)
    assert score == pytest.approx(whole[0][0], rel=1e-12) and greedy == whole[0][1]  # the order of a sum in fp64


def test_sampled_answers_differ_among_repeats_and_come_again(pair: tuple[LM, EngineLM]) -> None:
    _, ours = pair
    requests = ask("generate_until", *[(SENTENCES[0], {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8})] * 3)
    answers = ours.generate_until(requests, disable_tqdm=True)
    assert len(set(answers)) == 3 and ours.generate_until(requests, disable_tqdm=True) == answers


def test_conversations(pair: tuple[LM, EngineLM]) -> None:
    theirs, ours = pair
    messages = [{"role": "system", "content": "be brief "}, {"role": "user", "content": "who runs?"}]
    opened = [*messages, {"role": "assistant", "content": "the answer is"}]
    for chat, more in ((messages, True), (opened, False)):
        assert ours.apply_chat_template(chat, more) == theirs.apply_chat_template(chat, more)
    assert ours.tokenizer_name.startswith("bitnet-")


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        ("loglikelihood", ("the", " ".join(SENTENCES * 3)), "a continuation has .* expected 1 to 64, the model's"),
        ("loglikelihood", ("the", ""), "a continuation has 0 tokens: '' .*'the', or is empty; expected a target_delim"),
        ("generate_until", ("the", {"max_gen_toks": LENGTH}), "answers of 64 tokens, expected 1 to 63"),
        ("generate_until", ("the", {"top_q": 1, "max_gen_toks": 2}), "top_q.*did you mean|top_q"),
    ],
)
def test_a_request_that_cannot_be_met(
    pair: tuple[LM, EngineLM], kind: str, request_: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(pair[1], kind)(ask(kind, request_), disable_tqdm=True)


# ---- tasks ----


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """A task with choices and one with answers, and their questions."""
    questions = [
        {"question": text, "choices": ["the cat", "a dog and a house", "ten"], "answer": i % 3, "told": told}
        for i, (text, told) in enumerate(zip(SENTENCES, ["x", "y", "z"] * 3, strict=False))
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "questions.jsonl")}, "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{question}}?",
    }  # fmt: skip
    choices = {"task": "local_choices", "output_type": "multiple_choice", "doc_to_choice": "choices"}
    answers = {"task": "local_answers", "output_type": "generate_until", "doc_to_target": "told"}
    answers["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 4}
    files = folder / "choices.yaml", folder / "answers.yml"
    files[0].write_text(yaml.safe_dump(common | choices | {"doc_to_target": "answer"}))
    files[1].write_text(yaml.safe_dump(common | answers | {"metric_list": [{"metric": "exact_match"}]}))
    return files


def test_tasks_give_the_figures_of_transformers(
    pair: tuple[LM, EngineLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = pair
    names = [str(file) for file in write_tasks(tmp_path)]
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(theirs, tasks=names, num_fewshot=1, task_manager=manager)
    source = str(ours.model.path)
    assert bitnet_cli.main(["eval", source, "--tasks", ",".join(names), "--fewshot", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == source and found["n-samples"]["local_choices"]["effective"] == len(SENTENCES)
    for name, metric in (("local_choices", "acc,none"), ("local_answers", "exact_match,none")):
        assert found["results"][name][metric] == expected["results"][name][metric]
    assert found["n-shot"]["local_choices"] == 1


def test_the_table_and_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices, _ = write_tasks(tmp_path)
    model = small_model(tmp_path)
    assert bitnet_cli.main(["eval", str(model), "--tasks", str(choices), "--limit", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n-samples"]["local_choices"] == {"original": 7, "effective": 2}
    assert bitnet_cli.main(["eval", str(model), "--tasks", str(choices)]) == 0
    out, errors = capsys.readouterr()
    assert out.startswith("|") and "local_choices" in out and "<Model" in errors


def test_a_long_wait_is_told_before_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = []

    class Manager:
        all_tasks = ("arc_easy",)

        def __init__(self, include_defaults: bool) -> None:
            said.append(capsys.readouterr().err)

    monkeypatch.setattr("bitnet.harness.TaskManager", Manager)
    tasks_of(["arc_easy"])
    tasks_of([])  # as of files alone
    assert said[0].startswith("reading the list of all tasks of lm-evaluation-harness") and not said[1]


def test_no_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness would ask git, whose error outside of a repository stands among our lines, and pip, gcc and others
    what there is, which takes seconds; nobody sees what they say."""
    choices, _ = write_tasks(tmp_path)
    started: list[object] = []

    class Watched(subprocess.Popen[Any]):
        def __init__(self, command: Any, *more: Any, **options: Any) -> None:
            started.append(command)
            super().__init__(command, *more, **options)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    assert bitnet_cli.main(["eval", str(small_model(tmp_path)), "--tasks", str(choices), "--limit", "1"]) == 0
    assert started == []


def test_right_answers_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that says one thing, through its chat template, is right exactly where that is asked for."""
    _, answers = write_tasks(tmp_path)
    model = scripted_model(tmp_path / "model.bitnet", [b"y"], template=TEMPLATE)
    assert bitnet_cli.main(["eval", str(model), "--tasks", str(answers), "--chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["local_answers"]["exact_match,none"] == pytest.approx(2 / 7)


@pytest.mark.parametrize("names", [["a.yaml", ""], ["", "arc_easy"], [" "]])
def test_an_empty_name_is_refused_before_all_are_read(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitnet.harness.TaskManager", None)  # reading them would fail
    with pytest.raises(ValueError, match="has an empty name; expected names separated by single commas"):
        tasks_of(names)


def test_a_task_that_does_not_exist() -> None:
    check_names(["mine.yaml", "mine.yml", "arc_easy"], ["arc_easy", "arc_challenge"])
    with pytest.raises(ValueError, match=r"no task 'arc_eazy', did you mean arc_easy\?"):
        check_names(["arc_eazy"], ["arc_easy", "blimp"])
    with pytest.raises(ValueError, match="no task 'x'; `lm_eval ls tasks` lists them"):
        check_names(["x"], ["arc_easy"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "none.yaml"], "none.yaml does not exist, expected a file that defines a task"),
        (["--tasks", "{broken}"], "broken.yaml does not define a task: TemplateSyntaxError"),
        (["--tasks", "{folder}/half.yaml"], "half.yaml does not define a task: TypeError"),
        (["--tasks", "{folder}/torn.yaml"], "torn.yaml does not define a task: ParserError"),
        (["--tasks", "{choices}", "--chat"], "has no chat template"),
        (["--tasks", "{choices}", "--stride", "4"], "--stride is for text, not for --tasks"),
        (["--limit", "1"], "--limit goes with --tasks"),
    ],
)
def test_wrong_words(argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices, broken = *write_tasks(tmp_path)[:1], tmp_path / "broken.yaml"
    broken.write_text(choices.read_text().replace("{{question}}?", "{{question"))
    (tmp_path / "half.yaml").write_text("task: half")
    (tmp_path / "torn.yaml").write_text('{"task": 1')
    given = [word.format(choices=choices, broken=broken, folder=tmp_path) for word in argv]
    assert bitnet_cli.main(["eval", str(small_model(tmp_path)), *given]) == 1
    out, errors = capsys.readouterr()
    assert not out and message in errors.splitlines()[-1] and "Traceback" not in errors


def test_the_harness_knows_the_model_by_name(tmp_path: Path) -> None:
    choices, _ = write_tasks(tmp_path)
    manager = TaskManager(include_defaults=False)
    arguments = f"path={small_model(tmp_path)},threads=1,kv_type=f16"
    found = simple_evaluate(
        "bitnet", arguments, [str(choices)], batch_size=2, device="cuda:0", limit=1, task_manager=manager
    )
    assert found["n-samples"]["local_choices"]["effective"] == 1
    argv = [sys.executable, "-m", "bitnet.harness", "run", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--model_args" in done.stdout


def test_an_adapter_is_asked(tmp_path: Path) -> None:
    file = small_model(tmp_path)
    random_adapter(file, tmp_path / "a.bitnet", rank=4)
    with Model.load(file, kv_type="f32", adapters=[tmp_path / "a.bitnet"]) as model:
        for name in (None, "a"):
            asked = EngineLM(model, adapter=name)
            ((score, _),) = asked._loglikelihood_tokens([(None, [1, 2], [3, 4])], disable_tqdm=True)
            assert score == pytest.approx(sum(model.score([1, 2, 3, 4], adapter=name)[2:]), abs=1e-4)
            (answer,) = asked.generate_until(ask("generate_until", ("go", {"max_gen_toks": 8})), disable_tqdm=True)
            expected = model.generate("go", temperature=0, max_tokens=8, adapter=name)
            assert answer == expected.text, name


def test_a_model_that_cannot_be_asked(tmp_path: Path) -> None:
    with Model.load(small_model(tmp_path)) as model, pytest.raises(ValueError, match="names no end token"):
        EngineLM(model).loglikelihood(ask("loglikelihood", ("", "a")), disable_tqdm=True)
    encoder = small_model(tmp_path, config=SMALL.replace(mask="bidirectional"))
    with Model.load(encoder) as model, pytest.raises(ValueError, match="is bidirectional: its tokens see"):
        EngineLM(model)  # its logits are of the token at each position, not of the next one
