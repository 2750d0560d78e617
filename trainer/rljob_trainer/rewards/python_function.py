"""Loads a user's reward function and calls it; runs in the scoring process, never in the driver."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rljob_trainer.rewards.outcome import BadReturnError

RESERVED_NAMES = ("prompt", "response", "answer")


class LoadFunctionError(ImportError):
    """The file or the function in it cannot be used."""


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the file `path`; modules beside the file can be imported.

    Raises:
        LoadFunctionError: no such file, an error while importing it, no such function, or a signature that cannot take
            `(prompt, response, answer)`.
    """
    file = Path(path)
    if not file.is_file():
        raise LoadFunctionError(f"{path} does not exist")
    # The name is derived from the path so that two files of the same name do not replace each other.
    module_name = f"rljob_reward_{abs(hash(str(file.absolute())))}"
    specification = importlib.util.spec_from_file_location(module_name, file)
    if specification is None or specification.loader is None:
        raise LoadFunctionError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    directory = str(file.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise LoadFunctionError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name and not key.startswith("_")
        )
        raise LoadFunctionError(f"{path} has no function {name!r}; it has {found or 'none'}")
    try:
        inspect.signature(function).bind("", "", None, **dict.fromkeys(required_fields(function)))
    except TypeError as error:
        raise LoadFunctionError(
            f"{name} in {path} cannot be called as {name}(prompt, response, answer, **fields): {error}"
        ) from error
    return function


def required_fields(function: Callable[..., Any]) -> list[str]:
    """Parameters without default beyond the first three: columns that every row must have."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for position, parameter in enumerate(parameters)
        if parameter.kind in kinds
        and parameter.default is inspect.Parameter.empty
        and (position >= len(RESERVED_NAMES) or parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    ]


def call_function(
    function: Callable[..., Any], prompt: str, response: str, answer: Any, fields: Mapping[str, Any]
) -> Any:
    """`function(prompt, response, answer, **fields)`; fields that the signature does not name are left out unless it
    takes `**kwargs`.

    Raises:
        BadReturnError: the function is asynchronous.
        Exception: whatever the function raises.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = list(fields) if takes_any else list(parameters)[len(RESERVED_NAMES) :]
    named = {name: fields[name] for name in taken if name in fields and name not in RESERVED_NAMES}
    returned = function(prompt, response, answer, **named)
    if inspect.isawaitable(returned):
        raise BadReturnError("is asynchronous; define it with `def`, not `async def`")
    return returned
