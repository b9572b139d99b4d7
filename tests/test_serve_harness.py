"""lm-evaluation-harness over HTTP, as `local-completions` asks, without any code of ours: the scores of the engine.

A server that passes `echo` or `logprobs` over would score chance, and nobody would be told.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import PreTrainedTokenizerFast

from bitnet.evaluate.engine_lm import EngineLM
from bitnet_export.convert.incoming import convert
from hf_models import falcon_masters
from servers import served
from test_harness import LENGTH, SENTENCES, WORST, words

torch.set_num_threads(1)


def test_the_scores_of_the_engine_and_of_transformers(tmp_path: Path) -> None:
    published = falcon_masters()
    published.save(tmp_path / "hf")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(False), eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model.bitnet", head="f32", tokens=64)
    asked = [(context, " " + other) for context in SENTENCES for other in SENTENCES[:3] if context != other]
    requests = [Instance("loglikelihood", {}, each, i) for i, each in enumerate(asked)]
    with served(tmp_path / "model.bitnet") as serving:
        over_http = LocalCompletionsAPI(
            model="model", base_url=f"{serving.address}/v1/completions", tokenizer_backend="remote",
            max_length=LENGTH + 1, batch_size=4, max_retries=1,
        )  # fmt: skip
        found = over_http.loglikelihood(requests, disable_tqdm=True)
        # It ends at each of `until`, and knows no other way to be told of an end.
        question = [Instance("generate_until", {}, (SENTENCES[0], {"until": ["e"], "max_gen_toks": 8}), 0)]
        said = over_http.generate_until(question, disable_tqdm=True)
    native = EngineLM(tmp_path / "model.bitnet", max_length=LENGTH, threads=1, kv_type="f16")
    same = native.loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose([score for score, _ in found], [score for score, _ in same], rtol=0, atol=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in same]
    assert said == native.generate_until(question, disable_tqdm=True)
    with torch.compiler.set_stance("force_eager"):
        theirs = HFLM(published.model, tokenizer=tokenizer, max_length=LENGTH, batch_size=1)
        expected = theirs.loglikelihood(requests, disable_tqdm=True)
    n_tokens = [len(native.tok_encode(text, add_special_tokens=False)) for _, text in asked]
    difference = np.subtract([score for score, _ in found], [score for score, _ in expected]) / n_tokens
    # A token differs by 3e-3 once an activation rounds to another step (tests/test_harness.py); the mean does not.
    assert abs(difference).max() < WORST and abs(difference.mean()) < 1e-3, difference
    assert np.std([score for score, _ in found]) > 1, "no chance results"
