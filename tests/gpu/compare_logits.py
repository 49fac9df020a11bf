"""A real model's logits with the GPU kernels against the reference backend's, and exact checks of integer sums:

    python tests/gpu/compare_logits.py /path/to/SmolLM2-135M [--schemes w4a4 w2a4 w8a8] [--backend bitwise]

Both run on the same GPU in float16, so only the arithmetic of linear layers differs. Sums are exact on
both, and are scaled and rounded in the same order, so results should be bitwise equal. Prints a line per
scheme, writes rows to benchmarks/results/h200/logits.json (``--out``) and exits with 1 if a code or a sum differs.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402

from anybit import AnyBitConfig, QuantLinear, use_backend  # noqa: E402
from anybit.codes.reference import integer_product, quantize_activations  # noqa: E402
from anybit.kernels.bitplane import bitplane, bitplane_layout  # noqa: E402
from anybit.kernels.block import quantize_activations as activation_kernel  # noqa: E402
from anybit.kernels.common.types import Output  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from timing import merge_rows, stamp  # noqa: E402

PROMPT = (
    "Otters are carnivorous mammals in the subfamily Lutrinae. The 13 extant otter species are all semiaquatic, "
    "aquatic, or marine. Lutrinae is a branch of the Mustelidae family, which includes weasels, badgers, mink"
)


def wrong_sums(layer: QuantLinear, x: torch.Tensor) -> tuple[int, int]:
    """The number of codes of ``x``, and of the layer's integer sums, that differ from the reference's."""
    form, weight = layer.scheme.activations, layer.quantized_weight()
    expected = quantize_activations(x, form)
    packed = activation_kernel.quantize(x.reshape(-1, x.shape[-1]), form)
    codes = bitplane_layout.unpack(packed.codes, packed.m, packed.k)
    doubled = (weight.format.code == "bipolar") + (form.code == "bipolar")
    sums = bitplane.multiply(packed, bitplane_layout.prepare(weight), Output.s32)
    exact = integer_product(expected, weight) * 2**doubled
    return int((codes != expected.codes).sum()), int((sums.double() != exact).sum())


def compare(folder: str, scheme: str, backends: list[str], new_tokens: int = 32) -> list[dict[str, object]]:
    """One scheme: prints differences, and returns a row per backend; ``checked`` if all codes and sums are equal."""
    rows: list[dict[str, object]] = []
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=AnyBitConfig(scheme), dtype=torch.float16, device_map="cuda"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.cuda()
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    seen: dict[QuantLinear, tuple[torch.Tensor, torch.Tensor]] = {}
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}

    def run(backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        use_backend(model, backend)
        hooks = [layer.register_forward_hook(lambda m, x, y: seen.__setitem__(m, (x[0], y))) for layer in layers]
        logits = model(prompt).logits.float()
        for hook in hooks:
            hook.remove()
        return logits, model.generate(prompt, **settings)

    with torch.inference_mode():
        reference, expected_tokens = run("reference-decoded")
        outputs = dict(seen)
        wrong = [wrong_sums(layer, x) for layer, (x, _) in outputs.items()]
        wrong_codes, wrong_integers = sum(c for c, _ in wrong), sum(s for _, s in wrong)
        print(
            f"{scheme}: {len(outputs)} layers, {wrong_codes} codes and {wrong_integers} int32 sums differ", flush=True
        )
        for backend in backends:
            logits, tokens = run(backend or None)
            names = {layer._prepared.spec.backend for layer in layers if layer._prepared}
            unequal, results, worst = 0, 0, 0.0
            for layer, (x, expected) in outputs.items():
                y = layer(x)
                unequal, results = unequal + int((y != expected).sum()), results + y.numel()
                step = (expected.double().abs() * 2**-10).clamp(min=2**-24)
                worst = max(worst, float(((y.double() - expected.double()).abs() / step).max()))
            difference = (logits - reference).abs()
            agree = int((tokens == expected_tokens)[0].long().cumprod(0).sum()) - prompt.shape[1]
            top = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
            lines = [
                f"{scheme} on {', '.join(sorted(names))}:",
                f"same input: {unequal} of {results} results differ, by at most {worst:.2f} float16 steps",
                f"whole model: logits differ by {float(difference.max()):.4f} at most, {float(difference.mean()):.5f} "
                f"on average (their standard deviation is {float(reference.std()):.3f})",
                f"the largest logit is the same in {top:.1%} of {prompt.shape[1]} positions, {agree} of {new_tokens} "
                "generated tokens agree before diverging",
            ]
            print("\n  ".join(lines), flush=True)
            rows.append(
                {
                    "case": f"{Path(folder).name}, {backend or 'as anybit chooses'}",
                    "scheme": scheme,
                    "kernels": sorted(names),
                    "layers": len(outputs),
                    "codes_differ": wrong_codes,
                    "sums_differ": wrong_integers,
                    "results": results,
                    "results_differ": unequal,
                    "worst_float16_steps": round(worst, 3),
                    "logits_worst": round(float(difference.max()), 5),
                    "logits_mean": round(float(difference.mean()), 6),
                    "logits_deviation": round(float(reference.std()), 4),
                    "largest_logit_agrees": round(top, 4),
                    "tokens_agree": agree,
                    "tokens": new_tokens,
                    "checked": wrong_codes == wrong_integers == 0,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder with a Llama-like model")
    parser.add_argument("--schemes", nargs="*", default=["w4a4", "w2a4", "w8a8"])
    parser.add_argument("--backend", nargs="*", default=["", "bitwise"], help="'' lets anybit choose")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200" / "logits.json")
    options = parser.parse_args()
    for scheme in options.schemes:
        Scheme.parse(scheme)
    passed, marks = True, stamp()
    for scheme in options.schemes:
        rows = compare(options.model, scheme, options.backend)
        good = [row | marks for row in rows if row["checked"]]
        passed = passed and len(good) == len(rows)
        if good:
            merge_rows(options.out, good, ("case", "scheme"))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
