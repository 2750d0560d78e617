"""pydantic's JSON schema -> a structural schema that the API server accepts.

What differs: no $ref, no null, no `const`, no numeric exclusive bounds, no `additionalProperties` beside properties;
free-form maps keep unknown fields, every list says how it merges.
"""

from __future__ import annotations

from typing import Any, Final

from rljob_api.crdgen.cel import CELRule
from rljob_api.v1alpha1.base import ApiModel

JsonSchema = dict[str, Any]

_DROPPED: Final = frozenset({"title", "examples", "deprecated"})
_INT32_MAX: Final = 2**31 - 1


class SchemaError(ValueError):
    """A type that has no structural form; names the field."""


def build_structural_schema(
    model: type[ApiModel], rules: dict[str, list[CELRule]], *, with_defaults: bool = True
) -> JsonSchema:
    """The structural schema of a model.

    Args:
        model: the type.
        rules: CEL rules by class name of the model they belong to.
        with_defaults: False for status, which the API server must not fill.

    Raises:
        SchemaError: a type that Kubernetes cannot express.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    builder = _Builder(schema.pop("$defs", {}), rules, with_defaults)
    return builder.convert(schema, "")


class _Builder:
    def __init__(self, definitions: JsonSchema, rules: dict[str, list[CELRule]], with_defaults: bool) -> None:
        self._definitions = definitions
        self._rules = rules
        self._with_defaults = with_defaults

    def convert(self, schema: JsonSchema, path: str, open_refs: tuple[str, ...] = ()) -> JsonSchema:
        name = str(schema.get("title", ""))
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            if name in open_refs:
                raise SchemaError(f"{path}: {name} contains itself; CRDs have no recursion")
            siblings = {key: value for key, value in schema.items() if key != "$ref"}
            return self.convert({**self._definitions[name], "title": name, **siblings}, path, (*open_refs, name))
        if "anyOf" in schema and not schema.get("x-kubernetes-int-or-string"):
            inner = [option for option in schema["anyOf"] if option != {"type": "null"}]
            if len(inner) != 1:
                raise SchemaError(f"{path}: a union has no structural form")
            siblings = {key: value for key, value in schema.items() if key not in ("anyOf", "title")}
            return self.convert({**inner[0], **siblings}, path, open_refs)
        result = {key: value for key, value in schema.items() if key not in _DROPPED}
        if isinstance(result.get("description"), str):
            result["description"] = " ".join(result["description"].split())
        if "const" in result:
            result["enum"] = [result.pop("const")]
        self._convert_default(result, has_rules=name in self._rules)
        if result.get("x-kubernetes-int-or-string"):
            return _sort(result)
        match result.get("type"):
            case "object":
                self._convert_object(result, path, open_refs)
                self._attach_rules(result, name)
            case "array":
                if "items" not in result or result.pop("uniqueItems", False):
                    raise SchemaError(f"{path}: lists need an element type and must not be sets")
                result["items"] = self.convert(result["items"], f"{path}[]", open_refs)
                result["items"].pop("default", None)
                result.setdefault("x-kubernetes-list-type", "atomic")
            case "integer":
                _convert_bounds(result)
                result["format"] = "int32" if result.get("maximum", _INT32_MAX + 1) <= _INT32_MAX else "int64"
            case "number":
                _convert_bounds(result)
                result["format"] = "double"
            case "string" | "boolean":
                pass
            case other:
                raise SchemaError(f"{path}: type {other!r} has no structural form")
        return _sort(result)

    def _convert_default(self, result: JsonSchema, *, has_rules: bool) -> None:
        default = result.pop("default", None)
        if not self._with_defaults or default is None or default == []:
            # An empty list says no more than an absent one.
            return
        if isinstance(default, dict):
            # The defaults of the fields inside apply to it; tests compare the outcome with the types. CEL rules,
            # however, are checked against the bare default when the CRD is stored.
            default = _strip_empty(default) if has_rules else {}
        result["default"] = default

    def _convert_object(self, result: JsonSchema, path: str, open_refs: tuple[str, ...]) -> None:
        free_form = result.pop("additionalProperties", False)
        if "properties" in result:
            result["properties"] = {
                key: self.convert(value, f"{path}.{key}", open_refs) for key, value in result["properties"].items()
            }
        elif free_form is True:
            result["x-kubernetes-preserve-unknown-fields"] = True
            result.pop("default", None)
        elif isinstance(free_form, dict):
            raise SchemaError(f"{path}: typed maps are not used in this API; use a list with names")

    def _attach_rules(self, result: JsonSchema, name: str) -> None:
        rules = self._rules.get(name)
        if rules:
            result["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]


def _strip_empty(value: JsonSchema) -> JsonSchema:
    """A mapping without nulls, empty lists and empty mappings."""
    stripped = {key: _strip_empty(inner) if isinstance(inner, dict) else inner for key, inner in value.items()}
    return {key: inner for key, inner in stripped.items() if inner not in (None, [], {})}


def _convert_bounds(result: JsonSchema) -> None:
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in result:
            result[bound] = result[exclusive]
            result[exclusive] = True


def _sort(schema: JsonSchema) -> JsonSchema:
    """A fixed order, so that the generated file changes only where the types do."""
    order = ("description", "type", "format", "default", "enum")
    head = {key: schema[key] for key in order if key in schema}
    tail = {key: schema[key] for key in sorted(schema) if key not in head and key not in ("properties", "items")}
    body: JsonSchema = {key: schema[key] for key in ("items", "properties") if key in schema}
    if "required" in tail:
        tail["required"] = sorted(tail["required"])
    return {**head, **tail, **body}
