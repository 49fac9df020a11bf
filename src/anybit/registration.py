"""anybit in transformers' registers, without loading transformers for it.

Once anybit is imported a saved model is to load by its name alone, so transformers has to know anybit's quantizer and
attention by then. Loading transformers takes seconds, though, which ``anybit --help`` or ``anybit.Scheme`` have no use
for: where it is not loaded yet, anybit registers right after somebody has.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"
"""What every model of transformers is made with; when it is loaded, all that anybit's adapters need is."""


def register() -> None:
    """Put anybit's quantizer and its configuration, attention and mask into transformers' registers."""
    importlib.import_module("anybit.integrations.transformers")
    importlib.import_module("anybit.integrations.cache")


def register_in_time() -> None:
    """``register`` now if transformers' models are loaded, else right after they have been."""
    if MODELS in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds nothing itself; sees that ``MODELS`` is about to be loaded, and has ``register`` follow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for ``MODELS``, its loader followed by ``register``."""
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
