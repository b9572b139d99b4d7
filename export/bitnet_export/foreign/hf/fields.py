"""Values of a JSON object, checked for their types."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bitnet_export.foreign.source import SourceError


class Fields(dict[str, Any]):
    """An object of config.json; null counts as absent. Without a default, an absent value is a SourceError."""

    def __init__(
        self,
        values: Mapping[str, Any],
        what: str,
        *,
        theirs: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """theirs: alternative names of fields in the object, by our names. defaults: of missing fields."""
        ours = {other: name for name, other in theirs.items()}
        found: dict[str, Any] = dict(defaults)
        for key in sorted(values, key=lambda key: key in ours):
            name = ours.get(key, key)
            if name != key and values.get(name, values[key]) != values[key]:
                raise SourceError(f"{what}: {name} and {key} differ, expected one of them")
            found[name] = values[key]
        super().__init__({name: value for name, value in found.items() if value is not None})
        self.what, self._theirs = what, theirs

    def name(self, name: str) -> str:
        """The object's name of a field."""
        return self._theirs.get(name, name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int:
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected an integer")
        if abs(value) >= 1 << 63:  # larger than all floats, it would end their arithmetic
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected an integer of 64 bits")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected a number")
        return float(value)

    def truth(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected true or false")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected an object")
        return value

    def words(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise SourceError(f"{self.what}: {self.name(name)} is {value!r:.80}, expected a list of strings")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise SourceError(f"{self.what}: {self.name(name)} is missing")
        return value
