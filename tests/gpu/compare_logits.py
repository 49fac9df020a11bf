"""A real model's logits on the GPU kernels beside the reference backend's, and each layer's integer sums exactly:

    python tests/gpu/compare_logits.py /path/to/SmolLM2-135M [--schemes w4a4 w2a4 w8a8] [--backend bitwise]

Both run on the same GPU in float16, so that everything but the linear layers is the same arithmetic. Sums are exact on
both; scaled results are rounded to float16 once, from floats that may differ in their last bit. Prints a line a
scheme and exits with 1 if a code or a sum differs.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent.parent / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402

from anybit import AnyBitConfig, QuantLinear, use_backend  # noqa: E402
from anybit.kernels import bitwise, pack, planes  # noqa: E402
from anybit.kernels.bitwise import Output  # noqa: E402
from anybit.reference import integer_product, quantize_activations  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402

PROMPT = (
    "Otters are carnivorous mammals in the subfamily Lutrinae. The 13 extant otter species are all semiaquatic, "
    "aquatic, or marine. Lutrinae is a branch of the Mustelidae family, which includes weasels, badgers, mink"
)


def wrong_sums(layer: QuantLinear, x: torch.Tensor) -> tuple[int, int]:
    """How many codes of ``x``, and how many integer sums of the layer, differ from the reference's."""
    form, weight = layer.scheme.activations, layer.quantized_weight()
    expected = quantize_activations(x, form)
    packed = pack.quantize(x.reshape(-1, x.shape[-1]), form)
    codes = planes.unpack(packed.codes, packed.m, packed.k)
    doubled = (weight.format.code == "bipolar") + (form.code == "bipolar")
    sums = bitwise.multiply(packed, planes.prepare(weight), Output.s32)
    exact = integer_product(expected, weight) * 2**doubled
    return int((codes != expected.codes).sum()), int((sums.double() != exact).sum())


def compare(folder: str, scheme: str, backend: str | None, new_tokens: int = 32) -> bool:
    """One scheme; prints what differs and returns whether codes and sums are all equal."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=AnyBitConfig(scheme, backend=backend), dtype=torch.float16, device_map="cuda"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.cuda()
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    seen: dict[QuantLinear, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [layer.register_forward_hook(lambda m, x, y: seen.__setitem__(m, (x[0], y))) for layer in layers]
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        logits = model(prompt).logits.float()
        for hook in hooks:
            hook.remove()
        tokens = model.generate(prompt, **settings)
        names = {layer._prepared.spec.backend for layer in layers if layer._prepared}
        counts = [wrong_sums(layer, x) for layer, (x, _) in seen.items()]
        use_backend(model, "reference-packed")
        unequal, results, worst = 0, 0, 0.0
        for layer, (x, y) in seen.items():
            expected = layer(x)
            different = y != expected
            unequal, results = unequal + int(different.sum()), results + y.numel()
            if bool(different.any()):
                steps = (y.double() - expected.double()).abs() / (expected.double().abs() * 2**-10).clamp(min=2**-24)
                worst = max(worst, float(steps.max()))
        reference = model(prompt).logits.float()
        expected_tokens = model.generate(prompt, **settings)
    difference = (logits - reference).abs()
    agree = int((tokens == expected_tokens)[0].long().cumprod(0).sum()) - prompt.shape[1]
    top = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
    wrong_codes, wrong = sum(c for c, _ in counts), sum(s for _, s in counts)
    lines = [
        f"{scheme} on {', '.join(sorted(names))}: {len(seen)} layers, {wrong_codes} codes and {wrong} sums differ",
        f"same input: {unequal} of {results} results differ, by at most {worst:.2f} float16 steps",
        f"whole model: logits differ by {float(difference.max()):.4f} at most, {float(difference.mean()):.5f} on "
        f"average (their standard deviation is {float(reference.std()):.3f})",
        f"the largest logit is the same in {top:.1%} of {prompt.shape[1]} places, {agree} of {new_tokens} generated "
        "tokens agree before one does not",
    ]
    print("\n  ".join(lines), flush=True)
    return wrong_codes == wrong == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder with a Llama-like model")
    parser.add_argument("--schemes", nargs="*", default=["w4a4", "w2a4", "w8a8"])
    parser.add_argument("--backend", nargs="*", default=["", "bitwise"], help="'' lets anybit choose")
    options = parser.parse_args()
    for scheme in options.schemes:
        Scheme.parse(scheme)
    results = [compare(options.model, scheme, name or None) for scheme in options.schemes for name in options.backend]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
