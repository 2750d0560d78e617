"""Lets SGLang's CPU engine run from plain PyPI packages. For tests on machines without a GPU only.

SGLang has no CPU wheel of its kernels. Its pure-torch fallbacks carry Qwen2, Qwen3 and Llama, but it imports modules
at start that do not exist in such an environment. `rljob_sglang_cpu.pth` imports this module in every Python process
of the environment, because SGLang spawns its scheduler; nothing here imports anything heavy by itself.

1. `sgl_kernel`, `torchvision`, ...: answered with empty modules. An attribute that is really *called* raises, so that
   a missing kernel is an error and never a wrong number.
2. SGLang 0.5.16 registers the model type `qwen3_asr`, which transformers >= 5.17 has of its own: the registration is
   repeated with `exist_ok`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

ABSENT = frozenset({"sgl_kernel", "torchvision"})
QWEN3_ASR = "sglang.srt.configs.qwen3_asr"


class _Absent:
    """Stands for anything of a module that is not installed: importable, never usable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(
            f"{self._name} was called, but this environment is for CPU tests and has no {self._name}"
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _AbsentModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _AbsentLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _TolerantRegistration(importlib.abc.Loader):
    """Runs the real module with a registration that accepts what transformers has already."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from transformers import AutoConfig

        register = AutoConfig.register
        AutoConfig.register = staticmethod(lambda name, config, exist_ok=False: register(name, config, exist_ok=True))
        try:
            self._loader.exec_module(module)
        finally:
            AutoConfig.register = register


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, _AbsentLoader(), is_package=True)
        if fullname == QWEN3_ASR:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _TolerantRegistration(spec.loader)
            return spec
        return None


sys.meta_path.insert(0, _Finder())
# What SGLang asks of a machine without GPUs; a caller's own value wins.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
