"""Cases of sm90_packed_gemm: formats, shapes and configs, for the emulator (tiny), the compiler and the GPU."""

from dataclasses import dataclass, replace

import torch

from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm import Config
from anybit.scheme import ActivationFormat, WeightFormat
from cases_packed import FOREIGN

A16 = ActivationFormat()
INT8 = ActivationFormat(8, "sym")
FP8 = ActivationFormat(8, "float")


_DIRECT = (None, False, 1)
"""Positional arguments after a cut's blocks: automatic stages, not halved, one block per SM."""
_BY_MAP = (*_DIRECT, None, None, 0, True)
"""Positional arguments after a cut's blocks: outputs stored by a tensor map."""


@dataclass(frozen=True)
class Case:
    """A problem and its cut: the arguments of config_for, in order; without any, the default config."""

    problem: LinearProblem
    cut: tuple[int | bool | None, ...] = ()

    @property
    def config(self) -> Config:
        if not self.cut:
            return sm90_packed_gemm.default(self.problem)
        return sm90_packed_gemm.config_for(self.problem, *self.cut)

    def __str__(self) -> str:
        p, w = self.problem, self.problem.weights
        kind = {"f16": "a16", "bf16": "a16bf", "s8": "a8", "e4m3": "a8fp"}[p.operand.name]
        return f"w{w.bits}{kind}g{w.group}{w.code}{'s24' * w.sparse}-{p.m}x{p.n}x{p.k}-" + "_".join(map(str, self.cut))


# Every kind of cut: one block, split K within a block, over a cluster, X multicast over a cluster, both.
CUTS = [
    (64, 2, 1, 1, 1),
    (16, 1, 4, 1, 1),
    (128, 4, 1, 1, 1),
    (64, 1, 2, 2, 1),
    (128, 2, 1, 1, 2),
    (32, 2, 2, 2, 2),
    (48, 3, 1, 1, 1),
    (256, 2, 1, 1, 1),
    (64, 4, 1, 1, 1, None, True),
    (16, 2, 1, 1, 1, None, True),
    (64, 2, 1, 3, 1),
]
_RAGGED = [(37, 320, 520), (16, 192, 768), (70, 300, 1024), (33, 256, 1024), (128, 512, 512), (64, 260, 1040)]


def legal(case: Case) -> bool:
    return sm90_packed_gemm.why_not(case.problem, case.config) is None


def weight_formats(activations: ActivationFormat) -> list[WeightFormat]:
    """Every width with every code and group that the activations allow."""
    found = []
    for bits in range(1, 9):
        for code in ("sym", "asym", "bipolar"):
            for group in (None, 32, 64, 128, 256):
                weights = WeightFormat(bits, code, group)  # type: ignore[arg-type]
                if sm90_packed_gemm.why_not(LinearProblem(16, 64, 128, weights, activations)) is None:
                    found.append(weights)
    return found


def gpu_cases(every: int = 1) -> list[Case]:
    """Every n-th format on ragged shapes, cycling through cuts; then marlin's and Machete's own lists."""
    cases = []
    for activations in (A16, INT8, FP8):
        for i, weights in enumerate(weight_formats(activations)):
            dtype = (torch.float16, torch.bfloat16)[i % 2]
            problem = LinearProblem(*_RAGGED[i % len(_RAGGED)], weights, activations, dtype)
            # The next legal cut for this format: promoted sums need smaller tiles, few units fewer blocks.
            cuts = (CUTS * 2)[i % len(CUTS) :]
            cases.append(next(case for cut in cuts if legal(case := Case(problem, cut))))
    cases = cases[::every] + _gpu_sparse_cases()[:: 1 + every // 3]
    for i, weights in enumerate(FOREIGN):
        problem = LinearProblem(*_RAGGED[i % len(_RAGGED)], weights, A16, (torch.float16, torch.bfloat16)[i % 2])
        cases.append(next(case for cut in (CUTS * 2)[i % len(CUTS) :] if legal(case := Case(problem, cut))))
    w4 = WeightFormat(4, "sym", 128)
    for m in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 118, 128, 152, 768, 1024):
        problem = LinearProblem(m, 512, 1024, w4)
        cases.append(Case(problem))
    cases.append(Case(LinearProblem(1024, 512, 1024, w4), (64, 2, 1, 1, 1)))  # more tiles than SMs
    for m, cut in ((16, 16), (50, 64), (64, 64)):  # two blocks halve a row tile
        cases.append(Case(LinearProblem(m, 28672, 1024, w4), (cut, 4, 1, 1, 1, None, True)))
        cases.append(Case(LinearProblem(m, 1500, 1024, WeightFormat(3, "asym", 64)), (cut, 3, 1, 1, 1, None, True)))
    for m, n, k, cut in (
        (16, 4096, 1024, (16, 1, 2, 2, 1)),
        (60, 1500, 4096, (64, 1, 2, 1, 1)),
        (32, 700, 4096, (32, 1, 1, 2, 1)),
    ):
        cases.append(Case(LinearProblem(m, n, k, w4), (*cut, None, False, 2)))  # two blocks per SM
    cases.append(Case(LinearProblem(16, 6144, 1024, w4), (16, 1, 2, 2, 1, None, False, 2)))  # both of one launch
    for m, n, k, activations in (
        (32, 4096, 4096, A16),
        (128, 4096, 8192, A16),
        (16, 4096, 8192, INT8),
        (50, 6144, 1024, INT8),
    ):
        problem = LinearProblem(m, n, k, w4 if activations is A16 else WeightFormat(2), activations)
        cases.append(Case(problem))  # stages of two steps
    for weights, m, n, k, cut in (  # more weights than shared memory holds
        (w4, 64, 4096, 14336, (64, 1, 2, 2, 1, *_DIRECT, 2)),
        (WeightFormat(2, "asym", 64), 40, 1500, 4096, (48, 1, 2, 1, 1, *_DIRECT, 3)),
        (WeightFormat(3, "sym", None), 50, 700, 4224, (64, 1, 3, 2, 1, *_DIRECT, 2)),
        (WeightFormat(1, "bipolar", 128), 33, 4096, 1024, (48, 1, 2, 2, 1, *_DIRECT, 2)),
        (WeightFormat(8, "asym", 32), 64, 700, 2048, (64, 1, 2, 1, 1, *_DIRECT, 1)),
        (w4, 300, 6144, 2048, (128, 2, 1, 1, 1, *_DIRECT, 2)),
        (w4, 64, 1500, 2048, (64, 1, 2, 1, 2, *_DIRECT, 2)),
    ):
        for dtype in (torch.float16, torch.bfloat16):
            cases.append(Case(LinearProblem(m, n, k, weights, A16, dtype), cut))
    for weights, m, n, k, activations, cut in (  # stages with specialized code
        (w4, 128, 6144, 4096, A16, (64, 3, 1, 2, 1, *_DIRECT, 0, True)),
        (w4, 64, 4096, 14336, A16, (64, 1, 2, 2, 1, *_DIRECT, 0, True)),
        (WeightFormat(3, "asym", 64), 50, 700, 4224, A16, (48, 2, 1, 2, 1, *_DIRECT, 0, True)),
        (WeightFormat(2), 100, 1500, 2048, INT8, (128, 1, 2, 2, 1, *_DIRECT, 0, True)),
        (w4, 32, 6144, 4096, A16, (32, 1, 2, 2, 1, None, False, 2, 0, True)),
        (w4, 16, 4096, 14336, A16, (16, 1, 3, 2, 1, *_DIRECT, 0, True)),
    ):
        cases.append(Case(LinearProblem(m, n, k, weights, activations, torch.float16), cut))
    for m in (256, 1024):  # bytes that are not widened, in tiles of many tokens
        problem = LinearProblem(m, 512, 4096, WeightFormat(8), INT8, torch.float16)
        cases.append(Case(problem))
    for m, n, k in ((1, 128, 128), (13, 8192, 4096), (26, 4096, 8192), (64, 4096, 4096), (257, 128, 4096),
                    (257, 4224, 4160), (1024, 8192, 4096)):  # fmt: skip
        for activations in (A16, INT8):
            problem = LinearProblem(m, n, k, w4 if activations is A16 else WeightFormat(4), activations, torch.bfloat16)
            cases.append(Case(problem))
    return cases


def tiny_cases() -> list[Case]:
    """Emulator cases: one unit or a few, every operand, every kind of cut."""
    chosen = [
        (20, 70, 264, WeightFormat(4, "sym", 128), A16, torch.float16, (32, 2, 1, 1, 1)),
        (9, 64, 256, WeightFormat(3, "asym", 64), A16, torch.float16, (16, 1, 2, 1, 1)),
        (16, 64, 384, WeightFormat(8, "sym", None), A16, torch.bfloat16, (16, 1, 1, 2, 1)),
        (16, 128, 256, WeightFormat(1, "bipolar", None), A16, torch.float16, (16, 1, 1, 1, 2)),
        (12, 64, 640, WeightFormat(4, "sym", 128), A16, torch.float16, (16, 1, 4, 1, 1)),
        (20, 64, 256, WeightFormat(4, "asym", None), INT8, torch.float16, (32, 1, 2, 1, 1)),
        (20, 64, 1024, WeightFormat(4, "sym", None), INT8, torch.float16, (32, 1, 2, 1, 1)),  # span 2
        (12, 64, 256, WeightFormat(5, "sym", 64), INT8, torch.float16, (16, 1, 1, 1, 1)),
        (12, 64, 128, WeightFormat(4, "asym", 128), FP8, torch.bfloat16, (16, 1, 1, 1, 1)),
        # The last tile lacks so many tokens that it is loaded in smaller boxes.
        (65, 64, 264, WeightFormat(4, "sym", 128), A16, torch.float16, (48, 1, 1, 1, 1)),
        (3, 64, 256, WeightFormat(4, "sym", None), INT8, torch.float16, (64, 1, 2, 1, 1)),
        (70, 64, 256, WeightFormat(2, "sym", 128), A16, torch.bfloat16, (64, 1, 1, 2, 1)),
        (20, 64, 640, WeightFormat(4, "sym", 128), A16, torch.float16, (32, 1, 2, 2, 1)),
        (20, 70, 640, WeightFormat(4, "sym", 128), A16, torch.float16, (32, 2, 1, 3, 1)),  # tokens divide unevenly
        (9, 64, 512, WeightFormat(3, "sym", None), INT8, torch.float16, (16, 1, 1, 3, 1)),  # one finishes none
        # K is not a multiple of 8: rows of x have their own pitch.
        (20, 70, 261, WeightFormat(4, "sym", 128), A16, torch.float16, (32, 2, 1, 1, 1)),
        (9, 64, 395, WeightFormat(3, "asym", None), A16, torch.bfloat16, (16, 1, 2, 1, 1)),
        (20, 64, 33, WeightFormat(4, "asym", None), INT8, torch.float16, (32, 1, 1, 1, 1)),
        (12, 64, 129, WeightFormat(4, "asym", 128), FP8, torch.bfloat16, (16, 1, 1, 1, 1)),
        # Two blocks halve a row tile: three tiles a pair, and an incomplete last pair.
        (20, 190, 384, WeightFormat(4, "sym", 128), A16, torch.float16, (32, 2, 1, 1, 1, None, True)),
        (9, 300, 256, WeightFormat(3, "asym", 64), A16, torch.bfloat16, (16, 2, 1, 1, 1, None, True)),
        (13, 200, 512, WeightFormat(4, "asym", None), INT8, torch.float16, (16, 2, 1, 1, 1, None, True)),
        (50, 190, 1024, WeightFormat(4, "asym", 64), A16, torch.float16, (64, 2, 1, 1, 1, None, True)),  # span 2
        # More weights than shared memory holds: batches of one, where every stage has specialized code, then of two.
        (20, 64, 1152, WeightFormat(4, "asym", 64), A16, torch.float16, (32, 1, 2, 2, 1, *_DIRECT, 1)),
        (48, 64, 1152, WeightFormat(4, "sym", 128), A16, torch.float16, (48, 1, 2, 2, 1, *_DIRECT, 1)),
        (20, 70, 1408, WeightFormat(3, "asym", 128), A16, torch.bfloat16, (32, 1, 3, 1, 1, *_DIRECT, 2)),
        (20, 70, 520, WeightFormat(2, "sym", None), A16, torch.float16, (16, 2, 1, 1, 2, *_DIRECT, 2)),
        # Stages with specialized code.
        (48, 70, 1152, WeightFormat(4, "sym", 128), A16, torch.float16, (48, 1, 2, 2, 1, *_DIRECT, 0, True)),
        (20, 130, 896, WeightFormat(4, "asym", None), INT8, torch.float16, (32, 2, 1, 3, 1, *_DIRECT, 0, True)),
    ]
    for i, weights in enumerate(FOREIGN):  # in the pipeline, and beyond shared memory
        direct = (48, 1, 2, 2, 1, *_DIRECT, 1) if weights.group != 16 and i % 2 else (16, 1, 1, 1, 1)
        chosen.append((12, 64, 640, weights, A16, (torch.float16, torch.bfloat16)[i // 2 % 2], direct))
    cases = [Case(LinearProblem(m, n, k, w, a, dtype), cut) for m, n, k, w, a, dtype, cut in chosen]
    # Two blocks per SM, and idle blocks on a small device.
    small = replace(Device.named("sm_90a"), sms=4)
    problem = LinearProblem(12, 64, 384, WeightFormat(4, "sym", 128), device=small)
    spanned = LinearProblem(13, 128, 1024, WeightFormat(4, "sym", 128), device=replace(small, sms=3))
    walking = LinearProblem(100, 200, 768, WeightFormat(4, "sym", 128), device=replace(small, sms=3))
    return [
        *cases,
        *_tiny_sparse_cases(),
        Case(problem, (16, 1, 2, 2, 1, None, False, 2)),
        Case(spanned, (16, 1, 2, 2, 1)),
        Case(walking, (48, 2, 1, 1, 1, *_DIRECT, 2)),
        # 2:4 sparse: X multicast within a cluster, tensor map stores, two pairs for all tiles.
        *(
            Case(LinearProblem(m, n, k, w, a, dtype, small), (*cut, *_BY_MAP))
            for m, n, k, w, a, dtype, cut in (
                (45, 328, 264, _sparse(4, "asym", None), INT8, torch.bfloat16, (32, 2, 1, 1, 2)),
                (33, 136, 392, _sparse(8, "sym", None), INT8, torch.float16, (16, 4, 1, 1, 2)),
                (70, 408, 400, _sparse(3, "asym", 64), A16, torch.bfloat16, (48, 3, 1, 1, 2)),
                (50, 264, 640, _sparse(2), A16, torch.float16, (32, 2, 1, 1, 2)),
            )
        ),
    ]


def silu_cases() -> list[Case]:
    """Products with fused SiLU: every reduction, and tokens and rows that do not fill tiles."""
    w4, w3 = WeightFormat(4), WeightFormat(3, "asym", 64)
    chosen = [
        (37, 208, 256, w4, INT8, torch.float16, (32, 2, 1, 1, 1)),
        (70, 112, 384, WeightFormat(4, "asym"), INT8, torch.bfloat16, (48, 1, 1, 1, 1)),
        (20, 64, 256, w3, A16, torch.float16, (24, 1, 1, 1, 1)),
        (130, 272, 128, w4, INT8, torch.float16, (128, 4, 1, 1, 1)),
        (20, 128, 256, w4, INT8, torch.float16, (32, 1, 1, 1, 2)),  # X multicast
        (12, 64, 128, WeightFormat(4, "asym", 128), FP8, torch.bfloat16, (16, 1, 1, 1, 1)),
        (20, 80, 640, WeightFormat(4, "sym", 128), A16, torch.bfloat16, (32, 2, 1, 3, 1)),  # split K over blocks
        (20, 64, 256, w4, INT8, torch.float16, (32, 1, 2, 1, 1)),  # over warpgroups
        (45, 64, 1152, w3, A16, torch.float16, (48, 1, 2, 2, 1)),  # over both
        (13, 208, 512, w4, INT8, torch.float16, (16, 2, 1, 1, 1, None, True)),  # two blocks halve a row tile
        (20, 64, 520, WeightFormat(2), A16, torch.float16, (16, 2, 1, 1, 2, *_DIRECT, 2)),
    ]
    return [Case(LinearProblem(m, n, k, w, a, dtype), cut) for m, n, k, w, a, dtype, cut in chosen]


def _sparse(bits: int, code: str = "sym", group: int | None = 128) -> WeightFormat:
    return WeightFormat(bits, code, group, True)  # type: ignore[arg-type]


def _tiny_sparse_cases() -> list[Case]:
    """2:4 sparse weights: every width, codes and groups, every kind of cut."""
    chosen = [
        (20, 70, 264, _sparse(4), A16, torch.float16, (32, 2, 1, 1, 1)),
        (9, 64, 512, _sparse(4, "asym", 32), A16, torch.bfloat16, (16, 1, 2, 1, 1)),  # span 1
        (16, 64, 384, _sparse(8, "asym", None), A16, torch.float16, (16, 1, 1, 2, 1)),
        (33, 64, 512, _sparse(2, "asym", 64), A16, torch.float16, (48, 1, 2, 2, 1)),
        (17, 128, 300, _sparse(3, "asym", 256), A16, torch.bfloat16, (32, 1, 1, 1, 2)),
        (8, 64, 256, _sparse(5, "sym", None), A16, torch.float16, (16, 1, 1, 1, 1)),
        (8, 64, 256, _sparse(6, "asym", 64), A16, torch.bfloat16, (16, 1, 1, 1, 1)),
        (8, 64, 256, _sparse(7, "sym", 32), A16, torch.float16, (16, 1, 1, 1, 1)),
        (8, 64, 256, _sparse(8, "sym", 128), A16, torch.bfloat16, (16, 1, 1, 1, 1)),
        (50, 190, 1024, _sparse(4, "asym", 64), A16, torch.float16, (64, 2, 1, 1, 1, None, True)),  # halved, span 2
        (16, 256, 1024, _sparse(4), A16, torch.float16, (16, 4, 1, 1, 1)),
        (48, 70, 1152, _sparse(4), A16, torch.float16, (48, 1, 2, 2, 1, *_DIRECT, 0, True)),
        (17, 70, 256, _sparse(4, "sym", None), INT8, torch.float16, (32, 2, 1, 1, 1)),
        (9, 64, 256, _sparse(3, "asym", 64), INT8, torch.bfloat16, (16, 1, 2, 1, 1)),
        (8, 64, 260, _sparse(5, "asym", 32), INT8, torch.float16, (16, 1, 1, 2, 1)),
        (20, 64, 400, _sparse(7, "asym", None), INT8, torch.float16, (32, 1, 2, 1, 1)),
        (12, 64, 384, _sparse(8, "sym", None), INT8, torch.float16, (16, 1, 1, 1, 1)),
        (12, 64, 256, _sparse(2, "sym", 128), INT8, torch.float16, (16, 1, 1, 1, 1)),
        (12, 64, 256, _sparse(6, "sym", 32), INT8, torch.bfloat16, (16, 1, 1, 1, 1)),
        # Two blocks per SM.
        (40, 128, 1024, _sparse(4, "sym", None), INT8, torch.float16, (32, 1, 2, 1, 1, None, False, 2)),
        (12, 70, 1024, _sparse(2, "asym", None), INT8, torch.bfloat16, (16, 1, 2, 2, 1, None, False, 2)),
    ]
    return [Case(LinearProblem(m, n, k, w, a, dtype), cut) for m, n, k, w, a, dtype, cut in chosen]


def _gpu_sparse_cases() -> list[Case]:
    """Every width with and without zeros, groups in turn, cycling through cuts; then cuts for many tokens."""
    cases = []
    kinds = [(bits, code, x) for x in (A16, INT8) for bits in range(2, 9) for code in ("sym", "asym")]
    for i, (bits, code, activations) in enumerate(kinds):
        weights = _sparse(bits, code, (128, 32, None, 64, 256)[i % 5])
        m, n, k = _RAGGED[i % len(_RAGGED)]
        problem = LinearProblem(m, n, k + 4 * (i % 2), weights, activations, (torch.float16, torch.bfloat16)[i % 2])
        if sm90_packed_gemm.why_not(problem) is None:
            cuts = (CUTS * 2)[i % len(CUTS) :]
            cases.append(next(case for cut in cuts if legal(case := Case(problem, cut))))
    for m, n in ((9, 4096), (16, 4096), (32, 6144), (64, 4096), (128, 6144), (256, 6144)):  # realistic shapes
        problem = LinearProblem(m, n, 4096, _sparse(4, "sym", None), INT8)
        cases.append(Case(problem))
    for m, n, activations in ((256, 28672, A16), (300, 1504, A16), (1024, 6144, INT8)):  # ranges of rows, tensor maps
        problem = LinearProblem(m, n, 1024, _sparse(4, "sym", None if activations is INT8 else 128), activations)
        for block_tiles in (0, 7):
            cases.append(Case(problem, (128, 4, 1, 1, 1, None, False, 1, None, None, block_tiles, True)))
    for m, n, weights, activations, cut in (  # also X multicast
        (1021, 28672, _sparse(4, "sym", None), INT8, (192, 3, 1, 1, 2)),
        (1999, 4232, _sparse(4, "asym", None), INT8, (256, 2, 1, 1, 2)),
        (777, 6152, _sparse(8, "sym", None), INT8, (128, 4, 1, 1, 2)),
        (515, 4104, _sparse(2, "asym", 64), A16, (128, 4, 1, 1, 2)),
        (1021, 4232, _sparse(4), A16, (192, 3, 1, 1, 2)),
    ):
        for dtype in (torch.float16, torch.bfloat16):
            cases.append(Case(LinearProblem(m, n, 1040, weights, activations, dtype), (*cut, *_BY_MAP)))
    return cases
