"""What a product cannot be faster than: its operands read once, its products issued at the rate of the tensor cores."""

from anybit.tune.families import Product

# TOPS of wgmma, measured on an H200 (SM count and clock of others are near enough for a floor).
_RATES = {"b1": 15360.0, "s8": 1918.0, "e4m3": 1920.0, "f16": 931.0}
_LAUNCH_US = 0.3


def floor_us(product: Product) -> float:
    """Microseconds: the longer of reading weights and activations and writing results once, and of multiplying."""
    w, x = product.weights, product.activations
    m, n, k = product.m, product.n, product.k
    scales = n * w.groups(k) * 2
    size = n * k * w.bits / 8 + scales + m * k * (2 if not x.quantized else x.bits / 8) + 2 * m * n
    reading = size / product.device.bandwidth * 1e6
    operations = 2 * m * n * k * 1e-6
    if not x.quantized:
        multiplying = operations / _RATES["f16"]
    elif not x.integer:
        multiplying = operations / _RATES["e4m3"]
    else:
        multiplying = min(operations / _RATES["s8"], operations * w.bits * x.bits / _RATES["b1"])
    return _LAUNCH_US + max(reading, multiplying)
