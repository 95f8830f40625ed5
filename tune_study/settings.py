"""What every configuration object has in common: immutable, strict, and one line an error."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

Scalar = bool | int | float | str | None
"""A value that a setting can have in an axis or an arm."""


class ConfigError(ValueError):
    """A setting that cannot work. Its text is one line: field, value, remedy."""


class Config(BaseModel):
    """Base of every configuration object: frozen, strict about names, finite numbers.

    Raises:
        ConfigError: from the constructor, in place of pydantic's multi-line report.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_one_line(type(self), error)) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew."""
        return type(self)(**(self.model_dump() | changes))


def _one_line(model: type[BaseModel], error: ValidationError) -> str:
    """Folds pydantic's report of the first fault into `field = value: why. Remedy.`"""
    fault = error.errors(include_url=False)[0]
    path = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields))
        return f"{'.'.join(path)} is not a setting of {model.__name__}. Settings: {known}."
    message = fault["msg"].removeprefix("Value error, ").rstrip(".")
    if isinstance(fault.get("ctx", {}).get("error"), ConfigError):
        return ".".join([*path, message + "."])
    if not path:
        return f"{message}."
    message = message[0].lower() + message[1:]
    field = model.model_fields.get(path[0])
    remedy = f" Give {field.description}." if field and field.description else ""
    value = "" if fault["type"] == "missing" else f" = {fault['input']!r}"
    return f"{'.'.join(path)}{value}: {message}.{remedy}"
