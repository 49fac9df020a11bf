"""Linear layers of a model on the meta device become quantized ones, before their weights are loaded."""

from collections.abc import Collection

from torch import Tensor, nn
from transformers import PreTrainedModel

from anybit.checkpoints.configuration import Overrides
from anybit.errors import LayerError
from anybit.layers.linear import QuantLinear
from anybit.models import modules
from anybit.scheme import Scheme


class Loading(QuantLinear):
    """A QuantLinear yet to be quantized: it holds a placeholder for the checkpoint's weight until it is quantized."""

    transposed_source: bool = False

    def hold(self, placeholder: nn.Parameter, transposed: bool) -> None:
        """Take a meta parameter for the checkpoint's weight: [N, K], or [K, N] if it is stored transposed (Conv1D)."""
        placeholder.requires_grad_(False)
        self._parameters["weight"], self.transposed_source = placeholder, transposed

    @property
    def weight(self) -> Tensor:
        """The placeholder for the checkpoint's weight."""
        placeholder = self._parameters["weight"]
        assert placeholder is not None
        return placeholder

    def drop_placeholder(self) -> None:
        """Become a plain QuantLinear once the weight is quantized."""
        del self._parameters["weight"]
        self.__class__ = QuantLinear  # type: ignore[assignment]


def replace_linears(
    model: PreTrainedModel,
    scheme: Scheme,
    keep: list[str],
    backend: str | None = None,
    group_index: bool = False,
    placeholder: bool = False,
    hadamard: Collection[str] = (),
    *,
    overrides: Overrides,
) -> None:
    """Replace the Linear and Conv1D layers of a model on the meta device by QuantLinear, except those in ``keep``.

    placeholder: hold the float weight's place, to quantize it while it is loaded.
    Raises LayerError if a layer does not fit the scheme, or if no layer is left to quantize.
    """
    kind = Loading if placeholder else QuantLinear
    for found in modules.linear_layers(model, keep):
        module, name = model.get_submodule(found.name), found.name
        own = overrides.of(name) or scheme
        try:
            layer = kind(
                found.k, found.n, own, module.bias is not None, group_index=group_index, hadamard=name in hadamard,
                dtype=module.weight.dtype, device="meta", backend=backend,
            )  # fmt: skip
        except LayerError as error:
            advice = "name it in modules_to_not_convert to keep it in 16 bits"
            raise LayerError(f"layer {name}: {error}; {advice}") from None
        if isinstance(layer, Loading):
            layer.hold(module.weight, found.transposed)
        model.set_submodule(name, layer)
