"""Whatever other requests are running, an answer has the bits that `Model.generate` gives without drafts."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bitnet_export import random_adapter
from bitnet_runtime import Model
from bitnet_serve.server import Serving
from image_models import VOCAB, packed
from runtime_models import SMALL, TEMPLATE
from servers import as_http, connect, post, served, wait

FORMATS: list[dict[str, Any]] = [{}, {}, {"regex": "[a-f]{3,30}"}, {"json_schema": {"enum": ["one", "two"]}}]
KEYS = ("one", "two", "three")  # of clients, whose answers pause for each other
ADAPTERS = (None, "cats", "dogs")


def some(rng: random.Random, shared: list[int]) -> dict[str, Any]:
    """A request at random. Of the prompts some begin alike."""
    own = [rng.randrange(97, 122) for _ in range(rng.choice([1, 2, 7, 33, 64]))]
    adapter = rng.choice(ADAPTERS)
    return {
        "model": f"m:{adapter}" if adapter else "m",
        "prompt": rng.choice([[], shared[:70], shared]) + own,
        "max_tokens": rng.choice([1, 5, 20, 40]),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "presence_penalty": rng.choice([0, 0.5]),
        "seed": rng.randrange(1000),
        **rng.choice(FORMATS),
    }


def leave(serving: Serving, asked: dict[str, Any], reads: int, key: str) -> None:
    """A client that goes after some of a stream."""
    data = as_http("/v1/completions", asked | {"stream": True, "max_tokens": 100})
    data = data.replace(b"\r\n", b"\r\nauthorization: Bearer %s\r\n" % key.encode(), 1)
    with connect(serving, data) as connection:
        for _ in range(reads):
            connection.recv(300)


def test_the_same_bits_with_drafts_adapters_formats_and_neighbours_who_leave(tmp_path: Path) -> None:
    """200 requests at once, of which 40 are left: every state that a token was chosen from, by its digest."""
    rng = random.Random(2)
    path, adapters = tmp_path / "m.bitnet", [tmp_path / "cats.bitnet", tmp_path / "dogs.bitnet"]
    packed(path, SMALL.replace(vocab_size=VOCAB).with_draft(), template=TEMPLATE)
    for seed, file in enumerate(adapters):
        random_adapter(path, file, seed, rank=4 + seed)
    shared = [rng.randrange(97, 122) for _ in range(130)]
    asked = [some(rng, shared) for _ in range(200)]

    def ask(serving: Serving, i: int) -> Any:
        key = KEYS[i % 7 % 3]
        if i % 5 == 4:
            return leave(serving, asked[i], i % 4, key)
        status, found = post(serving, "/v1/completions", asked[i] | {"receipt": True}, authorization=f"Bearer {key}")
        assert status == 200, found
        return found["choices"][0]

    options: Any = {"adapters": adapters, "parallel": 4, "queue": 200, "api_keys": KEYS}
    with served(path, **options) as serving, ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda i: ask(serving, i), range(len(asked))))
        wait(lambda: serving.models["m"].scheduler.load == (0, 0))
    with Model.load(path, threads=1, adapters=adapters) as model:
        for one, choice in zip(asked, found, strict=True):
            if choice:
                options = {key: value for key, value in one.items() if key not in ("model", "prompt")}
                adapter = one["model"].partition(":")[2] or None
                expected = model.generate(one["prompt"], adapter=adapter, receipt=True, draft=0, **options)
                assert expected.receipt and choice["text"] == expected.text
                alone = json.loads(expected.receipt.to_json()) | {"n_ctx": choice["receipt"]["n_ctx"]}
                assert choice["receipt"] == alone
