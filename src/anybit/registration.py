"""Register anybit with transformers, without importing transformers.

After ``import anybit``, ``from_pretrained`` must find anybit's quantizer and attention. Importing transformers takes
seconds, which ``anybit --help`` and ``anybit.Scheme`` do not need: so if it is not imported yet, an import hook
registers anybit right after it is.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"
"""The module that every transformers model imports; once it is loaded, so is all that anybit's adapters need."""


def register() -> None:
    """Register anybit's quantizer, configuration, attention, mask and load-time checks with transformers."""
    importlib.import_module("anybit.hf.transformers")
    importlib.import_module("anybit.hf.cache")
    importlib.import_module("anybit.hf.guard")


def register_in_time() -> None:
    """Call ``register`` now if transformers' models are imported, else right after they are."""
    if MODELS in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """An import hook that finds nothing itself, but runs ``register`` after ``MODELS`` is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec for ``MODELS``, with a loader that also runs ``register``."""
        if fullname != MODELS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
