"""Python functions as tools: what a model is told of them, and a conversation with one."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bitnet_runtime import InvalidParameterError, Model
from bitnet_runtime.chat.signatures import described
from bitnet_runtime.chat.tools import Tools
from tool_models import ASK, calling_model


class Unit(enum.Enum):
    C, F = "celsius", "fahrenheit"


def forecast(town: str, days: int = 1, unit: Unit = Unit.C, kind: Literal["sun", "rain"] | None = None) -> str:
    """What the weather
    will be.

    Args:
        town: its name
        days (int): how many
    """
    return f"{town}: {days}"


def test_a_function_says_itself_what_it_is() -> None:
    def other(x: Annotated[list[float], 0, "numbers"], y: dict[str, bool] | None, s: tuple[int, ...] = (), z=5):  # type: ignore[no-untyped-def]
        return x

    def pair(a: tuple[int, str]) -> None: ...

    assert described(forecast) == ("forecast", "What the weather will be.", {
        "type": "object",
        "properties": {
            "town": {"description": "its name", "type": "string"},
            "days": {"description": "how many", "type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "kind": {"anyOf": [{"enum": ["sun", "rain"]}, {"type": "null"}]},
        },
        "required": ["town"],
        "additionalProperties": False,
    })  # fmt: skip
    properties = described(other)[2]["properties"]
    assert properties["x"] == {"type": "array", "items": {"type": "number"}, "description": "numbers"}
    assert properties["y"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "boolean"}}
    assert (properties["s"], properties["z"]) == ({"type": "array", "items": {"type": "integer"}}, {})
    for wrong in (pair, lambda *a: a, lambda a, /: a, print, lambda a: a, 5, functools.partial(int, "3")):
        with pytest.raises(InvalidParameterError, match=r"tool"):
            Tools.of([wrong])


class Place(typing.TypedDict):
    """Where.

    town: its name
    """

    town: str
    country: typing.NotRequired[str]


@dataclasses.dataclass
class Span:
    first: int
    last: int = 7
    marks: list[Place] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Size:
    """How large."""


class Endless(typing.TypedDict):
    within: "Endless"  # noqa: UP037


def test_a_class_with_fields_is_an_object() -> None:
    def report(place: Place, when: Span | None = None) -> None:
        """A report."""

    where = {
        "type": "object",
        "properties": {"town": {"description": "its name", "type": "string"}, "country": {"type": "string"}},
        "required": ["town"],
        "additionalProperties": False,
    }  # fmt: skip
    integers = {name: {"type": "integer"} for name in ("first", "last")}
    span = {
        "type": "object",
        "properties": integers | {"marks": {"type": "array", "items": where}},
        "required": ["first"],
        "additionalProperties": False,
    }  # fmt: skip
    properties = described(report)[2]["properties"]
    assert properties["place"] == where and properties["when"]["anyOf"][0] == span
    assert described(Place) == ("Place", "Where.", where) and described(Span) == ("Span", "", span)
    assert described(Size)[1] == "How large."
    with pytest.raises(InvalidParameterError, match="the tool Endless has a type within itself, expected an end"):
        described(Endless)


def test_what_a_partial_function_has_already_is_no_parameter() -> None:
    whole = described(forecast)
    for bound, left in (
        (functools.partial(forecast, days=3), {"town", "unit", "kind"}),
        (functools.partial(forecast, "Köln"), {"days", "unit", "kind"}),
        (functools.partial(functools.partial(forecast, "Köln"), unit="celsius"), {"days", "kind"}),
    ):
        name, purpose, shape = described(bound)
        assert (name, purpose) == whole[:2]
        assert shape["properties"] == {key: whole[2]["properties"][key] for key in left}
        assert shape["required"] == ["town"] * ("town" in left)


def test_a_parameter_is_described_by_the_lines_below_it() -> None:
    def numpy(town: str, days: int = 1, last: bool = False) -> None:
        """The weather.

        Parameters
        ----------
        town : str
            Its name,
            in full.
        days : int, optional
            How many.
        last : said here
        """

    def google(town: str, days: int = 1) -> None:
        """The weather.

        Args:
            town: its name,
                in full: as it is written
            days (int): how many

        Returns:
            days: as they are
        """

    described_by = [each.get("description") for each in described(numpy)[2]["properties"].values()]
    assert described_by == ["Its name, in full.", "How many.", "said here"]
    properties = described(google)[2]["properties"]
    assert properties["town"]["description"] == "its name, in full: as it is written"
    assert properties["days"]["description"] == "how many"


def test_a_type_of_typing_without_arguments_is_the_class_it_stands_for() -> None:
    def bare(a: typing.List, b: typing.Dict) -> None: ...  # type: ignore[type-arg]  # noqa: UP006
    def refused(a: typing.Set) -> None: ...  # type: ignore[type-arg]  # noqa: UP006

    assert described(bare)[2]["properties"] == {"a": {"type": "array"}, "b": {"type": "object"}}
    with pytest.raises(InvalidParameterError, match=r"the tool parameter refused\.a is of type"):
        described(refused)


def test_an_object_that_can_be_called() -> None:
    class Forecast:
        """The weather."""

        def __call__(self, town: str, days: int = 1) -> str:
            return f"rain in {town} for {days} days"

    for function, names in ((Forecast(), ["town", "days"]), (functools.partial(Forecast(), days=2), ["town"])):
        name, about, shape = described(function)
        assert (name, about, [*shape["properties"]], shape["required"]) == ("Forecast", "The weather.", names, ["town"])
        assert shape["properties"]["town"] == {"type": "string"}


def test_an_annotation_that_is_no_type() -> None:
    def refused(a: typing.Any) -> None: ...

    refused.__annotations__["a"] = [int]
    with pytest.raises(InvalidParameterError, match=r"the tool parameter refused\.a is of type \[<class 'int'>\]"):
        described(refused)


def test_a_conversation_with_a_function(tmp_path: Path) -> None:
    path = calling_model(
        tmp_path / "m", 'Let me see.\n<tool_call>\n{"name": "forecast", "arguments": {"town": "Köln"}}\n</tool_call>'
    )
    with Model.load(path, threads=1) as model:
        result = model.chat(ASK, tools=[forecast])
        (call,) = result.tool_calls
        assert (result.text, call.name, call.arguments) == ("Let me see.", "forecast", {"town": "Köln"})
        assert result.finish_reason == "stop"
        stream = model.stream_chat(ASK, tools=[forecast])
        found = list(stream)
        assert "".join(piece.text for piece in found) == "Let me see."
        assert json.loads("".join(part.text for piece in found for part in piece.calls)) == {"town": "Köln"}
        assert sum(len(piece.calls) > 0 for piece in found) > 3, "as it comes"
        assert stream.result is not None and stream.result.tool_calls[0].text == call.text
        said = [*ASK, result.message(), call.answer(forecast(**call.arguments))]
        text = model.render_template(said, [forecast])
        assert (
            text.count('{"name": "forecast", "arguments": {"town": "Köln"}}') == 1
            and "Köln: 1\n</tool_response>" in text
        )
        assert model.chat(ASK).text.endswith("</tool_call>"), "without tools it is text"
        assert model.chat(ASK, tools=[forecast], tool_choice="none").text.endswith("</tool_call>")
        cut = model.chat(ASK, tools=[forecast], max_tokens=20)
        assert cut.finish_reason == "length" and "<tool" not in cut.text
        whole = model.chat(ASK, tools=[forecast], stop=["forecast", "Köln", "}"])
        assert [each.text for each in whole.tool_calls] == [call.text], "a stop text ends texts, and breaks no call"
        early = model.chat(ASK, tools=[forecast], stop=["me"])
        assert (early.text, early.tool_calls, early.finish_reason) == ("Let ", [], "stop")
