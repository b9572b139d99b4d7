"""The engine with the interface of lm-evaluation-harness.

Texts are encoded, split and truncated as in the harness's class for transformers (`HFLM`), so that figures can be
compared. Only the order differs: requests are sorted by their tokens, and a prefix shared with the previous one, such
as a context or the few-shot examples of a task, is computed once.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from bitnet.evaluate.loss import log_probabilities
from bitnet_runtime import Model, Session
from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.answers.together import generate_batch
from bitnet_runtime.sessions.prompt import extend

MAX_LOGITS = 1 << 22  # most logits in memory at a time: 16 MB, and twice as much in fp64

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""The texts of a request, the tokens of its context, and those of its continuation."""


@register_model("bitnet")
class EngineLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A packed model with the harness's interface.

    path: a packed file, or an open Model. max_length: tokens of context, None: the model's.
    batch_size: answers that are generated together. threads, isa, kv_type: as in Model.load.
    between: called before each request, or batch of requests; an exception ends the evaluation.
    adapter: the name of an adapter that an open Model was loaded with.
    """

    def __init__(
        self,
        path: str | Path | Model,
        *,
        max_length: int | None = None,
        batch_size: int | str = 8,
        threads: int | None = None,
        isa: str | None = None,
        kv_type: str = "f32",
        between: Callable[[], None] = lambda: None,
        adapter: str | None = None,
        max_batch_size: int | None = None,  # the harness's command passes these two to every class;
        device: str | None = None,  # by default a GPU, but the engine runs on the CPU
    ) -> None:
        super().__init__()
        if not isinstance(path, Model):
            path = Model.load(str(path), n_ctx=max_length, threads=threads, isa=isa, kv_type=kv_type)
        self.model = path
        require_next_token(self.model)
        if not self.model.has_tokenizer:
            raise ValueError(f"{self.model.path.name} has no tokenizer, so it cannot be asked anything")
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() and int(batch_size) else 8  # also for "auto"
        self.between, self.adapter = between, adapter
        self._block = max(1, MAX_LOGITS // self.model.vocab_size)

    # ---- what the model is ----

    @property
    def max_length(self) -> int:
        return self.model.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer, if the task does not say; a small context is shared between question and answer."""
        return min(256, self.max_length // 2)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises ValueError if the file names none."""
        named = self._named("eos_token")
        ends = [*named, *sorted(self.model.end_tokens)]
        if not ends:
            raise ValueError(
                f"{self.model.path.name} names no end token, so a text cannot be scored from its beginning"
            )
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the start token, else the end token."""
        if self.model.bos_token is not None:
            return self.model.bos_token
        named = self._named("bos_token")
        return named[0] if named else self.eot_token_id

    def _named(self, name: str) -> list[int]:
        """The ids of a special token that the file names, empty unless it is a single token."""
        words = (self.model.metadata.get("generation") or {}).get("special_tokens") or {}
        ids = self.tok_encode(words[name], add_special_tokens=False) if isinstance(words.get(name), str) else []
        return ids if len(ids) == 1 else []

    @property
    def tokenizer_name(self) -> str:
        return f"bitnet-{hashlib.sha256(self.model.tokenizer_json).hexdigest()[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.tokenize(string, add_bos=add_special_tokens is not False, parse_special=True)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt as text; without `add_generation_prompt` the last message is left open, to be continued."""
        text = self.model.render_template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        content = last if last in text else last.strip()  # templates may trim
        if content not in text:
            raise ValueError(f"the chat template does not show the message {content!r:.80} as it is")
        return text[: text.rindex(content) + len(content)]

    # ---- scores ----

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-probability, and whether all of its tokens are the most probable."""
        answers: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
        with self.model.session(adapter=self.adapter) as session:
            for i in tqdm(order, desc="Scoring", disable=disable_tqdm or None):
                self.between()
                texts, context, continuation = requests[i]
                if texts is not None and not continuation:
                    raise ValueError(
                        f"a continuation has 0 tokens: {texts[1]!r:.80} begins within the last token of "
                        f"{texts[0][-20:]!r}, or is empty; expected a target_delimiter such as ' ', or another answer"
                    )
                answers[i] = self._score(session, context, continuation)
                if texts is not None:  # a whole request, not one window of it
                    self.cache_hook.add_partial("loglikelihood", texts, answers[i])
        return [answers[i] for i in range(len(requests))]

    def _score(self, session: Session, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The context is truncated on the left to fit. The last token is only predicted and need not fit."""
        if not 1 <= len(continuation) <= self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, expected 1 to {self.max_length}, the model's context"
            )
        tokens = (context + continuation)[-(self.max_length + 1) :]
        extend(session, tokens[: -len(continuation)])
        logits = session.logits
        assert logits is not None
        score, greedy = _judge(logits[None], continuation[:1])
        for start in range(0, len(continuation) - 1, self._block):
            stop = min(start + self._block, len(continuation) - 1)
            rows = session.append(continuation[start:stop], "all")
            more, likeliest = _judge(rows, continuation[start + 1 : stop + 1])
            score, greedy = score + more, greedy and likeliest
        return score, greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, each token scored once, in the harness's windows."""
        windows: list[Scored] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- answers ----

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, several generated together; for sampling, the seed is the request's place in the list."""
        prompts = [self._prompt(*request.args) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: prompts[i][0])
        answers: dict[int, str] = {}
        with (
            self.model.session(adapter=self.adapter) as session,
            tqdm(total=len(order), disable=disable_tqdm or None) as progress,
        ):
            for start in range(0, len(order), self.batch_size):
                self.between()
                batch = order[start : start + self.batch_size]
                with contextlib.ExitStack() as stack:
                    streams = []
                    for i in batch:
                        tokens, sampling = prompts[i]
                        extend(session, tokens)
                        own = stack.enter_context(session.fork())
                        streams.append(partial(self.model.stream, tokens, session=own, seed=i, **sampling))
                    for i, result in zip(batch, generate_batch(streams), strict=True):
                        answers[i] = result.text
                        self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
                progress.update(len(batch))
        return [answers[i] for i in range(len(requests))]

    def _prompt(self, context: str, options: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Tokens, truncated on the left to leave room for the answer, and options of `Model.stream`.

        Sampling options that the task does not set come from the file, or from `bitnet_runtime.defaults`.
        """
        sampling: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        most = sampling.pop("max_gen_toks")
        if not 1 <= most < self.max_length:
            raise ValueError(
                f"a task wants answers of {most} tokens, expected 1 to {self.max_length - 1}: question and answer "
                f"share the model's context of {self.max_length}"
            )
        if not sampling.pop("do_sample"):
            sampling["temperature"] = 0.0
        sampling["stop"] = tuple(text for text in sampling.pop("until") if text)
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return tokens[-(self.max_length - most) :], sampling | {"max_tokens": most}


def _judge(rows: Any, targets: Sequence[int]) -> tuple[float, bool]:
    """Log-probability of targets under rows of logits, and whether each is its row's most probable token."""
    return float(log_probabilities(rows, targets).sum()), bool((rows.argmax(1) == targets).all())
