"""What the vLLM adapter relies on in vLLM's API, read from the sources of a release without installing it.

    python tr_vllm_facts.py 0.24.0=DIRECTORY 0.33.0=DIRECTORY   # unpacked wheels; writes vllm_facts.json

`make_callable` turns a recorded signature into a function that refuses what the real one would refuse.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("vllm_facts.json")
METHODS = (
    "from_engine_args",
    "generate",
    "abort",
    "pause_generation",
    "resume_generation",
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "collective_rpc",
    "shutdown",
)
PROPERTIES = ("errored",)
LAYERWISE = "vllm/model_executor/model_loader/reload/layerwise.py"
Parameter = list[Any]


def read_tree(root: Path, path: str) -> ast.Module:
    return ast.parse((root / path).read_text(encoding="utf-8"))


def find(tree: ast.Module, name: str) -> Any:
    return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Parameter]:
    """[name, kind, has default] of each, without self and cls."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = [[item.arg, "POSITIONAL_OR_KEYWORD", index >= num_required] for index, item in enumerate(positional)]
    if arguments.vararg:
        parameters.append([arguments.vararg.arg, "VAR_POSITIONAL", False])
    parameters += [
        [item.arg, "KEYWORD_ONLY", default is not None]
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append([arguments.kwarg.arg, "VAR_KEYWORD", False])
    return [parameter for parameter in parameters if parameter[0] not in ("self", "cls")]


def list_fields(*classes: ast.ClassDef) -> list[str]:
    return sorted(
        node.target.id
        for found in classes
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    )


def read_facts(root: Path) -> dict[str, Any]:
    """Of one release."""
    engine = find(read_tree(root, "vllm/v1/engine/async_llm.py"), "AsyncLLM")
    methods = {node.name: node for node in engine.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    arguments = read_tree(root, "vllm/engine/arg_utils.py")
    layerwise = read_tree(root, LAYERWISE)
    outputs = read_tree(root, "vllm/outputs.py")
    return {
        "methods": {name: list_parameters(methods[name]) for name in METHODS},
        "coroutines": sorted(name for name in METHODS if isinstance(methods[name], ast.AsyncFunctionDef)),
        "properties": [name for name in PROPERTIES if name in methods],
        "engine_arguments": list_fields(find(arguments, "EngineArgs"), find(arguments, "AsyncEngineArgs")),
        "sampling": list_fields(find(read_tree(root, "vllm/sampling_params.py"), "SamplingParams")),
        "completion": list_fields(find(outputs, "CompletionOutput")),
        "layerwise": {
            name: list_parameters(find(layerwise, name))
            for name in ("initialize_layerwise_reload", "finalize_layerwise_reload", "finalize_layerwise_processing")
        },
    }


def load_facts() -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))
    return facts


def make_signature(parameters: list[Parameter]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=None if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default in parameters
        ]
    )


def make_callable(parameters: list[Parameter], answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer(**arguments)` by name, after the check that vLLM's own signature takes them."""
    signature = make_signature(parameters)

    def call(*positional: Any, **keywords: Any) -> Any:
        return answer(**signature.bind(*positional, **keywords).arguments)

    return call


if __name__ == "__main__":
    found = {version: read_facts(Path(root)) for version, root in (item.split("=") for item in sys.argv[1:])}
    FACTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
