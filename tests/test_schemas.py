"""JSON schemas as the library reads them: every text that it lets through is one of the schema's."""

from __future__ import annotations

import calendar
import itertools
import json
from typing import Any

import pytest

from bitnet_runtime.chat.dialects import dialect
from bitnet_runtime.chat.tools import Tools
from bitnet_runtime.errors import GrammarError, InvalidParameterError
from bitnet_runtime.structured.formats import Schema, format_text

compiling = pytest.importorskip("bitnet_runtime.structured.compiling")

BYTES = compiling.Compiler([bytes([i]) for i in range(256)], [], [], lambda text: list(text.encode()))
NUMBERS = [f"{sign}{whole}{rest}" for sign in ("", "-") for whole in ("0", "15", "16", "17")
           for rest in ("", ".0", ".0001", ".25", ".5", ".9")]  # fmt: skip
BOUNDS = [None, 0, 16, -16, 0.5, 0.001, 16.5, -0.5, -16.5, 17]


def accepts(schema: Schema, text: str) -> bool:
    matcher = BYTES.matcher("json_schema", format_text("json_schema", schema))
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "words", [*itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]
)
def test_bounds_of_numbers(words: tuple[str, str]) -> None:
    """A number is let in only if it lies within. (Not each that does: a zero at the end may be one too many.)"""
    inside = 0
    for low, high in itertools.product(BOUNDS, BOUNDS):
        if low is not None and high is not None and low >= high:
            continue
        bounds = {word: bound for word, bound in zip(words, (low, high), strict=True) if bound is not None}
        for text in NUMBERS:
            if accepts({"type": "number"} | bounds, text):
                value, inside = float(text), inside + 1
                assert low is None or value > low or (value == low and words[0] == "minimum"), (bounds, text)
                assert high is None or value < high or (value == high and words[1] == "maximum"), (bounds, text)
    assert inside > 500
    assert accepts({"type": "number", "minimum": 16, "maximum": 16}, "16")


@pytest.mark.parametrize("word", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("near", [2**53, 2**63 - 2048])
def test_bounds_that_are_no_doubles(near: int, word: str) -> None:
    """The library reads doubles, which are whole numbers 2 and more apart there. It may let in fewer."""
    sign, included = (1 if "max" in word.lower() else -1), word in ("minimum", "maximum")
    inside = 0
    for bound in (sign * (near + more) for more in (-1, 0, 1, 3, 1000)):
        for value in (bound + more for more in (-2048, -2, -1, 0, 1, 2, 2048)):
            if accepts({"type": "integer", word: bound}, str(value)):
                inside += 1
                assert sign * value < sign * bound or (value == bound and included), (bound, value)
    assert inside >= 5


@pytest.mark.parametrize(("word", "bound"), [("exclusiveMinimum", 2**53), ("exclusiveMaximum", -(2**53))])
def test_a_bound_is_excluded_where_a_step_of_1_changes_no_double(word: str, bound: int) -> None:
    assert not accepts({"type": "integer", word: bound}, str(bound))


@pytest.mark.parametrize("bound", [2**53, 2**53 + 1, 2**60 + 7, 2**63 - 2048])
@pytest.mark.parametrize("more", [{}, {"minimum": 2**53 + 2}, {"maximum": -(2**54) - 2}])
def test_a_schema_that_is_checked_again_stays(bound: int, more: dict[str, int]) -> None:
    """As that in a receipt, which allows what the answer was allowed."""
    far = {"exclusiveMinimum": -(10**30), "exclusiveMaximum": 10**30}
    numbers = [{"type": "integer", word: sign * bound} | more for word in far for sign in (1, -1)]
    dates = [{"format": each, "allOf": [{"maxLength": 60}]} for each in ("date", "time", "date-time")]
    for schema in [*numbers, far, *dates]:
        once = format_text("json_schema", schema)
        assert format_text("json_schema", once) == once


def test_of_two_bounds_the_nearer_one_holds() -> None:
    within = {"type": "integer", "exclusiveMinimum": 2**53, "minimum": 2**53 + 8, "exclusiveMaximum": 2**53 + 16}
    assert [n for n in range(0, 24, 2) if accepts(within, str(2**53 + n))] == [8, 10, 12, 14]


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 10**30, "maximum": 10**30 + 5},
        {"exclusiveMinimum": 2**63 - 1},
        {"exclusiveMinimum": 2**63 - 1024},
        {"minimum": 1e30, "maximum": 1e31},
        {"minimum": -1e31, "maximum": -1e30},
    ],
)
def test_bounds_beyond_64_bits(bounds: dict[str, float]) -> None:
    """The library would let in the last number of 64 bits, whatever the bound."""
    with pytest.raises(GrammarError, match=r"imum is -?[0-9e+]+, expected at (most|least) "):
        format_text("json_schema", {"type": "integer"} | bounds)


@pytest.mark.parametrize("most", [2**63 - 1, 10**30, 10**400, 1e22, 1e300])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_far_away_are_near_enough(kind: str, most: float) -> None:
    """The library refused these, such as the least number of 64 bits."""
    for bounds in ({"minimum": -most - 1, "maximum": most}, {"minimum": -most}, {"exclusiveMaximum": most}):
        for text in ("-9000000000000000000", "-5", "0", "9000000000000000000"):
            assert accepts({"type": kind} | bounds, text), bounds
    assert not accepts({"type": kind, "maximum": 5, "minimum": -most}, "9")


def test_a_bound_moves_by_little() -> None:
    """Also within another schema; values that look like a schema are left alone."""
    within = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [within]}}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    for text, good in (("0", False), ("0.000001", True), ("0.499999", True), ("0.5", False)):
        assert accepts(schema, f'{{"a": [{text}]}}') == good, text
    odd = {"exclusiveMinimum": True, "maximum": 0.5, "minLength": 2**63}
    assert json.loads(format_text("json_schema", odd) or "") == odd
    assert accepts({"const": within}, json.dumps(within))


@pytest.mark.parametrize("more", [{}, {"pattern": "^.*Z$"}, {"allOf": [{"pattern": "^.*Z$"}]}, {"maxLength": 60}])
@pytest.mark.parametrize(("written", "before"), [("time", ""), ("date-time", "2026-11-28T")])
def test_a_minute_has_sixty_seconds(written: str, before: str, more: dict[str, Any]) -> None:
    for seconds, good in (("59", True), ("00", True), ("60", False), ("59.25", True)):
        text = json.dumps(f"{before}13:37:{seconds}Z")
        assert accepts({"type": "string", "format": written} | more, text) == good, text


@pytest.mark.parametrize(("written", "after"), [("date", ""), ("date-time", "T13:37:00Z")])
def test_february_has_a_29th_day_in_leap_years_alone(written: str, after: str) -> None:
    for year, month, day in itertools.product((1900, 2000, 2023, 2024), (1, 2, 3, 12), (1, 9, 19, 28, 29, 30, 31)):
        good = day <= calendar.monthrange(year, month)[1]
        text = json.dumps(f"{year}-{month:02}-{day:02}{after}")
        assert accepts({"type": "string", "format": written}, text) == good, text


def test_constants_are_alternatives_of_which_one_holds() -> None:
    levels = {"oneOf": [{"const": 1, "title": "low"}, {"const": 2, "title": "high"}]}
    assert [accepts(levels, text) for text in ("1", "2", "3")] == [True, True, False]
    for both in ([{"const": 1}, {"const": 1.0}], [{"const": 1}, {"type": "number"}], [{"const": [1]}, {"const": [1]}]):
        with pytest.raises(ValueError, match="oneOf"):
            accepts({"oneOf": both}, "1")
    with pytest.raises(ValueError, match="oneOf"):
        accepts(levels | {"anyOf": [{"const": 1}]}, "1")


def test_a_schema_may_be_true() -> None:
    assert accepts(True, '{"a": 1}') and accepts("true", "null")
    with pytest.raises(ValueError, match="Unsatisfiable"):
        accepts(False, "null")


def test_the_parameters_of_a_tool_are_read_as_any_schema() -> None:
    properties = {"share": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}
    shape = {"type": "object", "properties": properties, "required": ["share"], "additionalProperties": False}
    tools = Tools.of([{"type": "function", "function": {"name": "f", "parameters": shape, "strict": True}}], "required")
    assert tools is not None
    grammar = dialect("").grammar(tools, None, {})
    for share, good in (("0", False), ("0.25", True), ("0.75", False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {{"share": {share}}}}}\n</tool_call>'
        matcher = BYTES.matcher("grammar", grammar)
        assert (matcher.validate_tokens(list(text.encode())) == len(text)) == good, share


def test_parameters_of_a_tool_that_the_library_cannot_hold() -> None:
    shape = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**64}}}
    tools = Tools.of([{"type": "function", "function": {"name": "f", "parameters": shape}}], "required")
    with pytest.raises(InvalidParameterError, match=r"^tools: the parameters of f: minimum is 18446744073709551616"):
        assert tools and dialect("").grammar(tools, None, {})


@pytest.mark.usefixtures("usual_depth")
def test_parameters_of_a_tool_that_are_nested_too_deeply() -> None:
    shape: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        shape = {"type": "object", "anyOf": [shape]}
    with pytest.raises(InvalidParameterError, match=r"^tools: .*recursion"):
        tools = Tools.of([{"type": "function", "function": {"name": "f", "parameters": shape}}], "required")
        assert tools and dialect("").grammar(tools, None, {})


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({}, ["5", "0.25" + "0" * 30, "1" * 30, "5e300"], ["007"]),
        ({"minimum": 0, "maximum": 10}, ["0.25" + "0" * 30], ["1" * 30, "5e1"]),
        ({"multipleOf": 0.01}, ["0.25", "1" * 30], ["0.251", "0.250", "5e1"]),
        ({"multipleOf": 0.01, "minimum": 0, "maximum": 10}, ["0.25", "10"], ["0.251", "1" * 30, "5e1"]),
    ],
)
def test_what_limits_the_digits_of_a_number(schema: Schema, allowed: list[str], refused: list[str]) -> None:
    assert all(accepts({"type": "number"} | schema, text) for text in allowed)
    assert not any(accepts({"type": "number"} | schema, text) for text in refused)
