"""/openapi.json is true: what it allows is accepted, what it does not is refused, and nothing makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from bitnet.data.tokenizer import FIM
from bitnet_serve.app import GENERATING, Api
from bitnet_serve.models.shelf import Shelf
from bitnet_serve.openapi import GET
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model
from servers import post, request, served


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    words = byte_tokenizer()
    words.add_special_tokens(list(FIM))
    path = tmp_path_factory.mktemp("models") / "m.bitnet"
    scripted_model(path, [b"b", b"c"], template=TEMPLATE, tokenizer=words, max_context=256)
    with served(path) as serving:
        yield serving


@pytest.fixture(scope="module")
def paths(serving: Serving) -> dict[str, Any]:
    status, _, document = request(serving, "GET", "/openapi.json")
    assert status == 200 and document["openapi"].startswith("3.1")
    return dict(document["paths"])


WORKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/fim/completions": {"prompt": "a", "max_tokens": 1},
    "/infill": {"input_prefix": "a", "max_tokens": 1},
    "/v1/embeddings": {"input": "a", "pooling": "mean"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
SOME = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def code(answer: Any) -> str:
    return str(answer["error"].get("code", ""))


def test_it_has_every_path(serving: Serving, paths: dict[str, Any]) -> None:
    routes = [route for route in Api(Shelf.__new__(Shelf), 1).application().routes if isinstance(route, Route)]
    answered = {route.path.replace("{name:path}", "{model}") for route in routes}
    assert set(paths) == answered - {"/", "/openapi.json"} == {*WORKS, *GET}
    for path in GET:
        assert request(serving, "GET", path.replace("{model}", "m"))[0] == 200
    assert [each["name"] for each in paths["/v1/models/{model}"]["parameters"]] == ["model"]


@pytest.mark.parametrize("path", WORKS)
def test_its_fields_are_those_that_are_known(serving: Serving, paths: dict[str, Any], path: str) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    status, answer = post(serving, path, WORKS[path])
    assert status == 200, answer
    status, answer = post(serving, path, WORKS[path] | {"no_such_field": 1})
    assert status == 400 and "no_such_field" in str(answer)
    for name in schema["required"]:
        assert post(serving, path, {key: value for key, value in WORKS[path].items() if key != name})[0] == 400, name
    for name in schema["properties"]:
        status, answer = post(serving, path, WORKS[path] | {name: None})
        assert status == 200 or name in WORKS[path], (name, answer)  # null counts as absent
        _, answer = post(serving, path, WORKS[path] | {name: {"a": [1]}})
        assert "unknown parameter" not in str(answer), name


@pytest.mark.parametrize("path", WORKS)
def test_values_out_of_its_ranges_are_refused(serving: Serving, paths: dict[str, Any], path: str) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    samples = path in GENERATING
    for name, kinds in schema["properties"].items():
        kind = kinds.get("anyOf", [{}])[0]
        wrong = [kind[word] + step for word, step in (("minimum", -1), ("maximum", 1)) if word in kind]
        wrong += [{"a": 1}] if kind.get("type") in ("integer", "number", "string", "boolean", "array") else []
        for value in wrong if samples or name in WORKS[path] else []:
            status, answer = post(serving, path, WORKS[path] | {name: value})
            assert status == 400, (name, value, answer)
    if samples:
        most = schema["properties"]["logit_bias"]["anyOf"][0]["maxProperties"]
        _, answer = post(serving, path, WORKS[path] | {"logit_bias": {str(token): 0 for token in range(most + 1)}})
        assert f"expected at most {most}" in str(answer)


def test_longer_lists_than_it_says_are_refused(serving: Serving, paths: dict[str, Any]) -> None:
    """Of texts to embed and of tools; as long as it says they are taken."""

    def most(path: str, name: str, place: int) -> int:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"][name]
        return int(schema["anyOf"][place]["maxItems"])

    texts = ["a"] * most("/v1/embeddings", "input", -2)
    assert post(serving, "/v1/embeddings", {"input": texts, "pooling": "mean"})[0] == 200
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        short = {"type": "function", "name": "x"} if path == "/v1/responses" else {"name": "x", "input_schema": {}}
        tool = short if path != "/v1/chat/completions" else {"type": "function", "function": {"name": "x"}}
        status, answer = post(serving, path, WORKS[path] | {"tools": [tool] * (most(path, "tools", 0) + 1)})
        assert status == 400 and f"expected at most {most(path, 'tools', 0)}" in str(answer)
    status, answer = post(serving, "/v1/embeddings", {"input": [*texts, "a"], "pooling": "mean"})
    assert status == 400 and f"expected at most {len(texts)}" in str(answer)


@pytest.mark.parametrize("path", WORKS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_comes_is_answered_or_refused(serving: Serving, paths: dict[str, Any], path: str, data: Any) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = st.sampled_from(sorted(set(schema["properties"]) - {"stream"}))
    body = WORKS[path] | data.draw(st.dictionaries(names, SOME, max_size=3))
    status, answer = post(serving, path, body)
    assert status in (200, 400, 404), (body, answer)
    if status != 200:
        assert answer["error"]["message"]
