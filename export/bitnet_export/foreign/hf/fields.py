"""Values of a JSON object, each with the type that is expected of it."""

from __future__ import annotations

from typing import Any

from bitnet_export.foreign.source import SourceError


class Fields(dict[str, Any]):
    """An object of config.json; null counts as absent. Without a default, an absent value is a SourceError."""

    def __init__(self, values: dict[str, Any], what: str) -> None:
        super().__init__({key: value for key, value in values.items() if value is not None})
        self.what = what

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int:
            raise SourceError(f"{self.what}: {name} is {value!r:.80}, expected an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise SourceError(f"{self.what}: {name} is {value!r:.80}, expected a number")
        return float(value)

    def truth(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise SourceError(f"{self.what}: {name} is {value!r:.80}, expected true or false")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise SourceError(f"{self.what}: {name} is {value!r:.80}, expected an object")
        return value

    def words(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise SourceError(f"{self.what}: {name} is {value!r:.80}, expected a list of strings")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise SourceError(f"{self.what}: {name} is missing")
        return value
