"""Layouts that no tool here can write on a CPU, constructed by hand from their documentation, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import generator

from anybit.checkpoints.formats import FORMATS
from anybit.checkpoints.formats.stored import StoredLayer, ordered
from anybit.checkpoints.safetensors import Entry
from anybit.codes.packing import QuantizedWeight, pack_words, words_per_row
from anybit.errors import CheckpointError
from anybit.scheme import Scheme

READERS = {format.name: format for format in FORMATS}
N, K = 32, 64


def scheme_of(name: str, made: StoredLayer) -> Scheme:
    return READERS[name].open(made)[0]


def read(name: str, made: StoredLayer) -> QuantizedWeight:
    return READERS[name].open(made)[1]()


def layer(config: dict[str, Any], **tensors: torch.Tensor) -> StoredLayer:
    stored = {f"l.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    entries = {n: Entry(n, Path("x"), t.dtype, tuple(t.shape), 0, t.nbytes) for n, t in stored.items()}
    return StoredLayer(entries, stored.__getitem__, "l", config)


def along(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes [R, C] -> words [R, C*b/32], least significant bit first along C; widths that divide 32."""
    shifts = torch.arange(0, 32, bits)
    return (codes.long().view(codes.shape[0], -1, 32 // bits) << shifts).sum(-1).to(torch.int32)


def random(*shape: int, top: int = 16) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=generator(sum(shape) + top))


def gptq(zero: torch.Tensor, g_idx: torch.Tensor, **config: Any) -> tuple[StoredLayer, torch.Tensor]:
    """A 4-bit layer of v1, and its weight: scale * (q - (stored zero + 1))."""
    codes, scales = random(K, N), (torch.rand(zero.shape[0], N, generator=generator(1)) / 8).half()
    made = layer(
        {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": False, "group_size": 32, **config},
        qweight=along(codes.t()).t().contiguous(), qzeros=along(zero), scales=scales, g_idx=g_idx,
    )  # fmt: skip
    groups = g_idx.long()
    return made, (scales.float()[groups] * (codes - (zero[groups] + 1))).t()


def check(name: str, made: StoredLayer, expected: torch.Tensor, scheme: str | None = None) -> None:
    """A reader makes the expected weight of a layer, bit for bit, in the expected scheme."""
    assert scheme is None or str(scheme_of(name, made)) == scheme
    assert torch.equal(read(name, made).dequantize(), expected)


def test_gptq_zeros_of_v1_run_to_sixteen() -> None:
    check("gptq", *gptq(random(2, N) | 15, torch.arange(K) // 32), "w4a16g32min")


def test_gptq_groups_of_uneven_sizes_are_an_activation_order() -> None:
    made, expected = gptq(random(2, N, top=15), (torch.arange(K) >= 24).int())
    check("gptq", made, expected)
    assert ordered(made) and not ordered(gptq(random(2, N, top=15), torch.arange(K) // 32)[0])


@pytest.mark.parametrize("group", [-1, 2])
def test_gptq_groups_that_are_not_there_are_refused(group: int) -> None:
    made, _ = gptq(random(2, N, top=15), torch.arange(K) // 32)
    made["g_idx"][5] = group
    with pytest.raises(CheckpointError, match=r"names groups .* it has 0 to 1"):
        read("gptq", made)


@pytest.mark.parametrize(
    ("size", "kind", "fine"),
    [(512, "in order", True), (512, "shuffled", False), (128, "unset", True), (128, "shuffled", True)],
)
def test_activation_orders_of_compressed_tensors(size: int, kind: str, fine: bool) -> None:
    """A group of 512 is two of 256 here, unknown to an activation order; -1 means no order there."""
    k = 1024
    codes, scale, index = random(N, k), torch.rand(N, k // size, generator=generator(3)), torch.arange(k) // size
    if kind == "shuffled":
        index = index[torch.randperm(k, generator=generator(4))]
    stored = torch.full((k,), -1) if kind == "unset" else index
    made = layer(
        {"format": "pack-quantized"},
        weight_packed=along(codes), weight_scale=scale, weight_shape=torch.tensor([N, k]), weight_g_idx=stored.int(),
    )  # fmt: skip
    assert ordered(made) == (kind == "shuffled")
    if fine:
        check("compressed-tensors", made, scale[:, index] * (codes - 8))
    else:
        with pytest.raises(CheckpointError, match="activation order over groups of 512 inputs"):
            read("compressed-tensors", made)


def test_compressed_tensors_with_one_scale_for_a_layer() -> None:
    """int-quantized with strategy tensor; its zero point is a single number, too."""
    codes = random(N, K, top=256).sub(128).to(torch.int8)
    for zero, more in ((3, {"weight_zero_point": torch.tensor([3], dtype=torch.int8)}), (0, {})):
        made = layer({"format": "int-quantized"}, weight=codes, weight_scale=torch.tensor([0.5]), **more)
        check("compressed-tensors", made, 0.5 * (codes.float() - zero))


def padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] -> words of 32 // bits codes each, as compressed-tensors before 0.18 packs them."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.int(), (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    return (codes << bits * torch.arange(each, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def packed(
    bits: int, k: int, pack: Callable[[torch.Tensor, int], torch.Tensor], **config: Any
) -> tuple[StoredLayer, torch.Tensor]:
    """An asymmetric layer of 21 outputs, its codes packed by ``pack``, and its weight."""
    codes, zero, scale = random(21, k, top=2**bits), random(21, 1, top=2**bits), torch.rand(21, 1)
    made = layer(
        {"format": "pack-quantized", **config},
        weight_packed=pack(codes, bits), weight_zero_point=pack(zero.t(), bits).t().contiguous(), weight_scale=scale,
        weight_shape=torch.tensor([21, k]),
    )  # fmt: skip
    return made, scale * (codes.float() - zero)


def saying(bits: int) -> dict[str, Any]:
    return {"g": {"targets": ["Linear"], "weights": {"num_bits": bits}}}


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("k", [2048, 100])
def test_words_that_compressed_tensors_padded(bits: int, k: int) -> None:
    """7-bit codes take as many words as 8-bit ones, and 100 inputs may take as many as dense ones."""
    for pack, version in ((padded, "0.17.1"), (pack_words, "0.18.0")):
        made, expected = packed(bits, k, pack, config_groups=saying(bits), version=version)
        assert scheme_of("compressed-tensors", made).weights.bits == bits
        check("compressed-tensors", made, expected)


@pytest.mark.parametrize(
    ("bits", "k", "config"), [(3, 100, saying(3)), (3, 100, {**saying(3), "version": "0.17.2a20260601"}), (4, 16, {})]
)
def test_words_of_two_packings_or_widths_are_refused(bits: int, k: int, config: dict[str, Any]) -> None:
    version = {"version": config.pop("version")} if "version" in config else {}
    made, _ = packed(bits, k, pack_words, config_groups=config, **version)
    with pytest.raises(CheckpointError, match=rf"{k} inputs in {words_per_row(k, bits)} words .* version"):
        scheme_of("compressed-tensors", made)


def test_few_codes_have_the_bits_that_are_said() -> None:
    """16 inputs of 3 bits are two words, as are those of 4."""
    check("compressed-tensors", *packed(4, 16, pack_words, config_groups=saying(4)))


@pytest.mark.parametrize("stored", [7, 8])
def test_a_symmetric_gptq_layer_tells_its_own_version(stored: int) -> None:
    made, expected = gptq(torch.full((2, N), stored), torch.arange(K) // 32, sym=True, checkpoint_format="gptq_v2")
    assert str(scheme_of("gptq", made)) == "w4a16g32"
    spread = made["scales"].float()[torch.arange(K) // 32].t()
    torch.testing.assert_close(read("gptq", made).dequantize(), expected + spread * (stored - 7))


def test_modelopt_nvfp4() -> None:
    codes, values = random(N, K), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale = (torch.rand(N, K // 16, generator=generator(5)) * 100).to(torch.float8_e4m3fn)
    made = layer(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        weight=packed, weight_scale=scale, weight_scale_2=torch.tensor(0.01),
    )  # fmt: skip
    signed = values[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    expected = signed * (scale.float() * torch.tensor(0.01)).repeat_interleave(16, 1)
    check("modelopt NVFP4", made, expected, "w4a16g16e2m1")


@pytest.mark.parametrize(("method", "shape"), [("fbgemm_fp8", (N, 1)), ("modelopt", ())])
def test_fp8_of_fbgemm_and_modelopt(method: str, shape: tuple[int, ...]) -> None:
    """A scale per row, with a bound for activations in config.json; or one scale, and one for inputs."""
    weight = torch.randn(N, K, generator=generator(5)).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator(6)) / 64
    more = {"input_scale": torch.tensor(0.5)} if method == "modelopt" else {}
    made = layer({"quant_method": method, "quant_algo": "FP8"}, weight=weight, weight_scale=scale, **more)
    assert READERS["fp8"].matches(made.config)
    check("fp8", made, weight.float() * scale, "w8a16e4m3")


def test_mxfp8() -> None:
    """A power-of-two scale per 32 inputs, stored as its exponent."""
    weight = torch.randn(N, K, generator=generator(7)).to(torch.float8_e4m3fn)
    exponents = random(N, K // 32, top=20).add(110).to(torch.uint8)
    made = layer({"quant_method": "mxfp8"}, weight=weight, weight_scale=exponents)
    spread = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    check("fp8", made, weight.float() * spread, "w8a16g32e4m3")


@pytest.mark.parametrize("block", [[128, 128], "128x128"])
def test_fp8_blocks_of_compressed_tensors_end_where_the_layer_does(block: object) -> None:
    """192 outputs and inputs in blocks of 128 have two scales each way, as have 256."""
    weight = torch.randn(192, 192, generator=generator(8)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, generator=generator(9))
    settings = {"targets": ["Linear"], "weights": {"strategy": "block", "block_structure": block}}
    made = layer({"config_groups": {"group_0": settings}}, weight=weight, weight_scale=scale)
    expected = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :192]
    check("compressed-tensors", made, expected)


def test_fp8_scales_that_are_not_those_of_the_stated_blocks_are_refused() -> None:
    weight, scale = torch.zeros(192, 192).to(torch.float8_e4m3fn), torch.ones(3, 3)
    made = layer({"weight_block_size": [128, 128]}, weight=weight, weight_scale_inv=scale)
    with pytest.raises(CheckpointError, match="3 x 3 scales does not fit 192 x 192 weights in blocks of 128 x 128"):
        scheme_of("fp8", made)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_the_last_group_may_be_shorter(name: str) -> None:
    """96 inputs in groups of 64 have two groups, as have 96 in groups of 48."""
    k, scale = 96, (torch.rand(N, 2, generator=generator(1)) / 8).half()
    codes = torch.full((N, k), 9)
    nines = torch.full((k, N // 8), -0x66666667, dtype=torch.int32)  # in any order
    eights = torch.full((2, N // 8), -0x77777778, dtype=torch.int32)
    config: dict[str, Any] = {"quant_method": name, "group_size": 64, "version": "gemm"}
    if name == "compressed-tensors":
        config = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": 64}}}}
        made = layer(config, weight_packed=along(codes), weight_scale=scale, weight_shape=torch.tensor([N, k]))
    elif name == "awq":
        made = layer(config, qweight=nines, qzeros=eights, scales=scale.t().contiguous())
    else:
        made = layer(config, qweight=along(codes).t().contiguous(), qzeros=eights, scales=scale.t().contiguous())
    check(name, made, scale.float()[:, torch.arange(k) // 64])


@pytest.mark.parametrize(("size", "scheme"), [(48, "w4a16g16asym"), (1024, "w4a16g256asym"), (4096, "w4a16asym")])
def test_other_group_sizes_are_cut_into_smaller_ones(size: int, scheme: str) -> None:
    k = {48: 96, 1024: 2048, 4096: 2048}[size]
    groups = -(-k // size)
    codes, zero, scales = random(k, N), random(groups, N, top=15), torch.rand(groups, N).half()
    made = layer(
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False, "group_size": size},
        qweight=along(codes.t()).t().contiguous(), qzeros=along(zero), scales=scales,
    )  # fmt: skip
    index = torch.arange(k) // size
    check("gptq", made, (scales.float()[index] * (codes - zero[index])).t(), scheme)


@pytest.mark.parametrize(
    ("name", "config", "tensors", "why"),
    [
        ("hqq", {}, {"axis": torch.tensor(0)}, "grouped along the outputs"),
        ("hqq", {}, {"quant_zero": torch.tensor(1)}, "are quantized themselves"),
        ("bitnet", {"use_rms_norm": True}, {"weight": torch.zeros(8, K, dtype=torch.uint8)}, "normalizes its input"),
        ("bitnet", {}, {"weight": torch.zeros(N, K)}, "stored as floats"),
        ("bitsandbytes", {}, {"weight__quant_state__bitsandbytes__fp4": torch.zeros(1)}, "bitsandbytes' FP4"),
        ("bitsandbytes", {}, {"SCB": torch.ones(N), "weight_format": torch.tensor(2)}, "in a kernel's layout"),
        ("fp8", {}, {"weight": torch.zeros(N, K), "weight_scale": torch.ones(1)}, "float32, not float8_e4m3fn"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name, config, tensors, why) -> None:
    with pytest.raises(CheckpointError, match=f"layer l cannot be read: .*{why}"):
        scheme_of(name, layer(config, **tensors))


@pytest.mark.parametrize("bad", ["scales", "weights"])
def test_what_is_not_finite_is_refused(bad: str) -> None:
    codes = torch.full((N, K), 0x7F if bad == "weights" else 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made = layer({"quant_method": "fp8"}, weight=codes, weight_scale=torch.tensor([{"scales": torch.inf}.get(bad, 1)]))
    with pytest.raises(CheckpointError, match="not finite" if bad == "scales" else "hold NaN"):
        read("fp8", made)


def test_2_4_bitmasks_of_compressed_tensors() -> None:
    """As compressed-tensors 0.10 writes sparse-24-bitmask; version 0.17 no longer does."""
    mask = torch.zeros(N, K // 4, 4, dtype=torch.bool)
    mask.scatter_(-1, torch.rand(N, K // 4, 4, generator=generator(0)).topk(2, -1).indices, True)
    codes = random(N, K, top=255).to(torch.int16).sub(127).to(torch.int8) * mask.view(N, K)
    bits = along(mask.view(N, K), 1).view(torch.uint8)
    tensors = {
        "compressed": codes[mask.view(N, K)].view(N, K // 2), "bitmask": bits, "shape": torch.tensor([[N], [K]]),
        "weight_scale": torch.rand(N, 2, generator=generator(1)),
    }  # fmt: skip
    expected = codes.float() * tensors["weight_scale"].repeat_interleave(32, 1)
    check("compressed-tensors", layer({}, **tensors), expected, "w8a16g32s24")
    bits[0, 0] = 0x07
    with pytest.raises(CheckpointError, match="two of four"):
        read("compressed-tensors", layer({}, **tensors))
    with pytest.raises(CheckpointError, match=r"float16.*float8_e4m3fn"):
        scheme_of("compressed-tensors", layer({}, **tensors | {"compressed": tensors["compressed"].half()}))
