"""The draft tokens of a model's draft head, by the engine and by torch, on the same chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .findings import Agreement, Scores

if TYPE_CHECKING:
    from bitnet.model.transformer import Transformer
    from bitnet_runtime import Model

FREQUENT = 32_768  # runtime_c/src/session/guess.c


def compare_guesses(
    engine: Model, model: Transformer, reference: Transformer, texts: NDArray[np.int64], *, estimated: bool
) -> Agreement | None:
    """log p that the draft gives each token of a chain that the engine drafts behind each of the texts (n, T).

    reference: the model in fp64. estimated: the engine only estimates log p, by the sketch of a large head. It drafts
    the likeliest token nevertheless, so torch's log p of that token takes the place of the estimate.
    None: the model has no draft, or the texts fill its context.
    """
    from bitnet.model.draft import STEPS

    if not model.draft or texts.shape[1] + STEPS > model.config.max_context:
        return None
    guessed, found = _by_engine(engine, texts, STEPS)
    chains = np.concatenate([texts, guessed], 1)
    (ours, likeliest), (theirs, _) = (_by_torch(which, chains, STEPS) for which in (model, reference))
    return Agreement.of(likeliest if estimated else found, ours, theirs, (len(texts), STEPS))


def _by_engine(engine: Model, texts: NDArray[np.int64], steps: int) -> tuple[NDArray[np.int64], Scores]:
    """The guesses (n, steps), and log p of each."""
    from bitnet_runtime.defaults import resolve
    from bitnet_runtime.sessions.sampler import Sampler

    greedy, chains = Sampler(resolve({"temperature": 0}), engine.vocab_size), []
    with engine.session() as session:
        for text in texts.tolist():
            session.reset()
            session.feed(text[:-1])
            chains.append(session.guess(greedy, text[-1], steps))
    tokens, sure = zip(*(zip(*chain, strict=True) for chain in chains), strict=True)
    return np.array(tokens), np.log(np.array(sure, np.float64))


def _by_torch(model: Transformer, chains: NDArray[np.int64], steps: int) -> tuple[Scores, Scores]:
    """log p of the last `steps` tokens of each chain, the guesses, and of the likeliest tokens among those that the
    engine may have chosen from."""
    import torch

    from bitnet.straight_through import embedding_rows

    tokens, config = torch.from_numpy(chains), model.config
    assert model.draft and model.embedding
    with torch.inference_mode():
        hidden = model.hidden(tokens[:, :-1])[:, :-1]
        rows = embedding_rows(tokens[:, 1:-1], model.embedding.weight, config.head_format, scope=config.weight_scale)
        states = model.draft.states(hidden, rows, None, steps)
        last = torch.stack([state[:, step - steps] for step, state in enumerate(states)], 1)
        log_p = model.own_head.logits(last).double().log_softmax(-1)
        guessed = tokens[:, -steps:]
        found: Scores = log_p.gather(-1, guessed[..., None])[..., 0].numpy()
        frequent = max(FREQUENT, config.vocab_size // 4)  # with at least twice as many, it may guess among these alone
        likeliest = log_p.amax(-1)
        if config.vocab_size >= 2 * frequent:
            likeliest = torch.where(guessed < frequent, log_p[..., :frequent].amax(-1), likeliest)
    return found, likeliest.numpy()
