"""Argo CD's verdict on an RLJob: the shipped script in Lua 5.1, as Argo CD runs it."""

from __future__ import annotations

from typing import Any

from chart_tools import CHART
from lupa.lua51 import LuaRuntime, lua_type

HEALTH_SCRIPT = (CHART / "files/argocd/health.lua").read_text()


def judge_health(document: dict[str, Any]) -> tuple[str, str]:
    """Health status and message. The script gets `obj` and no library that could reach out of it."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.execute("io = nil; os = nil; require = nil; package = nil")

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return lua.table_from({key: convert(item) for key, item in value.items()})
        if isinstance(value, list):
            return lua.table_from([convert(item) for item in value])
        return value

    lua.globals().obj = convert(document)
    result = lua.execute(HEALTH_SCRIPT)
    assert lua_type(result) == "table"
    return result.status, result.message
