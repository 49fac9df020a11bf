// Any-precision GEMM on the 1-bit tensor cores: Y = X W^T with W of 1 to 8 bits and X of 1 to 8, plane by plane.
//
// Both operands are bit planes (see sm90_bitplane.py): [chunk of 1024 k][plane][row][128 bytes], rows in the 128-byte swizzle of
// wgmma, so that any run of rows is one contiguous copy into a tile that the tensor cores read. Weights stand on
// wgmma's M side (a thread owns two rows of weights, whose constants stay in registers), tokens on its N side.
//
// The accumulators hold sum over k of uw * ux of unsigned codes. One accumulator set serves all p * q products: those
// with i + j = d share a shift, and the sum is kept rotated so that bit 0 of the register has weight 2^d. Walking d
// up rotates right by one, walking it down rotates left by one; chunks of k alternate, and the last one walks down to
// d = 0. Rotations lose nothing while the sum fits 32 bits, which why_not() checks.
#ifndef ANYBIT_BITWISE_CUH
#define ANYBIT_BITWISE_CUH

#include "gemm/sm90_bitplane_gemm.cuh"
#include "gemm/sm90_bitplane_resident.cuh"
#include "gemm/sm90_bitplane_skinny.cuh"

template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::blocks) sm90_bitplane(const __grid_constant__ Params p) {
    if constexpr (Config::path == Path::large)
        sm90_bitplane_gemm<Config>(p);
    else if constexpr (Config::path == Path::once)
        sm90_bitplane_resident<Config>(p);
    else
        sm90_bitplane_skinny<Config>(p);
}

#endif  // ANYBIT_BITWISE_CUH
