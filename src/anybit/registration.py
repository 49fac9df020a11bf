"""Register anybit with transformers, without loading transformers.

Once anybit is imported, a saved model loads by its name alone, so transformers must know anybit's quantizer and
attention by then. Loading transformers takes seconds, which ``anybit --help`` and ``anybit.Scheme`` do not need. So if
transformers is not loaded yet, anybit registers right after it has been.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"
"""The module that every transformers model needs; once it is loaded, so is all that anybit's adapters need."""


def register() -> None:
    """Register anybit's quantizer, configuration, attention, mask and refusals with transformers."""
    importlib.import_module("anybit.integrations.transformers")
    importlib.import_module("anybit.integrations.cache")
    importlib.import_module("anybit.integrations.guard")


def register_in_time() -> None:
    """``register`` now if transformers' models are loaded, else right after they have been."""
    if MODELS in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds nothing itself; when ``MODELS`` is about to be loaded, it makes ``register`` run afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders return for ``MODELS``, with ``register`` run after its loader."""
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
