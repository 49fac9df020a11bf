"""Roofline of a GEMM: operands read once, MMAs issued at the tensor cores' rate.

Both rates were measured on an H200, between other kernels of a chain; for other GPUs reading is scaled by bandwidth,
multiplying by multiprocessors and what data sheets promise of one.
"""

import itertools

from anybit.kernels.linear_problem import LinearProblem

RATES = {"b1": 15360.0, "s8": 1918.0, "e4m3": 1920.0, "f16": 931.0, "sparse s8": 3839.0, "sparse f16": 1710.0}
"""Issue rates of wgmma in TOPS; sparse rates count the skipped zeros as operations."""
_SMS = 132
_OF_ONE = {
    "sm_80": 0.39, "sm_86": 0.23, "sm_89": 0.34, "sm_90a": 1.0, "sm_100a": 2.03, "sm_103a": 2.03, "sm_120a": 0.34,
}  # fmt: skip
"""A multiprocessor's rate beside one of an H200: the data sheets' dense rates, of int8 or fp16, the faster one."""

# Bytes read once -> microseconds of a kernel in a chain with programmatic dependent launch (plain loads).
_READ_US = ((0, 0.30), (4.2e6, 1.02), (8.6e6, 1.87), (13.0e6, 2.79), (30.3e6, 6.50), (60.6e6, 12.98), (121e6, 25.83))
_BANDWIDTH = 4.67e12


def read_us(size: float) -> float:
    """Microseconds to read ``size`` bytes once on an H200, interpolated between measurements."""
    for (s0, t0), (s1, t1) in itertools.pairwise(_READ_US):
        if size <= s1:
            return t0 + (t1 - t0) * (size - s0) / (s1 - s0)
    return size / 4.68e6


def floor_us(product: LinearProblem) -> float:
    """Microseconds: the maximum of memory time (operands read and results written once) and MMA time."""
    w, x = product.weights, product.activations
    m, n, k = product.m, product.n, product.k
    scales = n * w.groups(k) * (4 if w.code == "min" else 2)
    bits = (w.bits + 2) / 2 if w.sparse else w.bits  # half of the codes, each with 2 bits of metadata
    size = n * k * bits / 8 + scales + m * k * (2 if not x.quantized else x.bits / 8) + 2 * m * n
    reading = read_us(size * _BANDWIDTH / product.device.bandwidth)
    operations = 2 * m * n * k * 1e-6 * _SMS / (product.device.sms * _OF_ONE[product.device.arch])
    if not x.quantized:
        multiplying = operations / RATES["sparse f16" if w.sparse else "f16"]
    elif not x.integer:
        multiplying = operations / RATES["e4m3"]
    elif w.sparse:
        multiplying = operations / RATES["sparse s8"]
    else:
        multiplying = operations / RATES["s8"]
        if product.device.capability < 100:  # later ones emulate products of bits
            multiplying = min(multiplying, operations * w.bits * x.bits / RATES["b1"])
    return max(reading, multiplying)
