"""Writes the receipt of an answer while it is made."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet_runtime.answers.receipt import Receipt, sampling_of, written
from bitnet_runtime.answers.transcript import Transcript
from bitnet_runtime.defaults import Sampling, resolve
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.shape import digest_of


class Witness:
    """Of one answer. It asks the session at once what it is: that may be closed when the receipt is written."""

    def __init__(
        self, model: ModelFacts, session: Session, prompt: Sequence[int], options: Sampling, seed: int
    ) -> None:
        self._model, adapter = model.digest, session.adapter
        self._adapter = None if adapter is None else digest_of(model, adapter)
        self._kv_type, self._n_ctx = session.kv_type, session.n_ctx
        self._prompt, self._options, self._seed = prompt, options, seed
        self.digests: list[int | None] = []  # of the states that tokens were chosen from

    def chosen(self, session: Session, n: int) -> None:
        """So many tokens were chosen from the last states of the session."""
        self.digests.extend(session._digests(session.position - n, n))

    def forced(self, n: int) -> None:
        """So many tokens come without a choice."""
        self.digests.extend([None] * n)

    def receipt(self, answer: Transcript) -> Receipt:
        chosen = len(answer.tokens) + (answer.ended_by is not None)  # there may be more after a stop text
        options, finish = self._options, answer.finish
        if answer.answer.parted:  # stop texts were looked for in what no receipt shows
            options = resolve({"stop": ()}, options)
            finish = "cancelled" if finish == "stop" and answer.ended_by is None else finish
        return Receipt(
            self._model, self._adapter, self._kv_type, self._n_ctx, list(self._prompt), list(answer.tokens),
            answer.ended_by, finish, self._seed, sampling_of(options),
            [written(each) for each in self.digests[:chosen]],
        )  # fmt: skip
