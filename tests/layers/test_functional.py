"""anybit.quantize and anybit.matmul: the kernels without modules."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import anybit
from anybit.errors import LayerError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a8", "w2a2", "w1a16", "w3a16g32asym"])
def test_a_product_is_that_of_a_layer(scheme: str) -> None:
    dense, x, bias = torch.randn(48, 64), torch.randn(2, 3, 64), torch.randn(48)
    weight = anybit.quantize(dense, scheme)
    y = anybit.matmul(x, weight, bias)
    assert torch.equal(y, anybit.QuantLinear.from_weight(weight.restore(), scheme, bias)(x))
    again = anybit.quantize(weight.restore(), scheme)
    assert torch.equal(anybit.matmul(x, again, bias), y)


def test_what_is_not_prepared_is_refused() -> None:
    with pytest.raises(LayerError, match=r"anybit.quantize\(weight, scheme\)"):
        anybit.matmul(torch.randn(1, 64), torch.randn(8, 64))  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="asks for another"):
        anybit.quantize(anybit.quantize(torch.randn(8, 64), "w4a16g32").restore(), "w3a16g32")


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["matmul.py", "w4a8", "2"])
    runpy.run_path(str(EXAMPLES / "matmul.py"), run_name="__main__")
    assert "w4a8, 2 x 512 x 512 on cpu" in capsys.readouterr().out
