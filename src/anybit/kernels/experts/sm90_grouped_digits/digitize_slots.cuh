// Digits of the slots of each token tile, as digitize makes those of tokens. blockIdx.x: at_once blocks of 128 columns;
// blockIdx.y: a token tile that routing wrote; blockIdx.z: some of its tokens, a warp each.
#ifndef ANYBIT_DIGITIZE_SLOTS_CUH
#define ANYBIT_DIGITIZE_SLOTS_CUH

#include "packed/sm80_digits/digitize.cuh"

struct SlotsParams {
    const uint16_t* x;
    const int32_t* token;    // a slot's row of x; null: a row a slot
    const uint4* token_tile;
    const uint32_t* token_tile_count;
    uint8_t* digits;         // [token tiles][column blocks][block_bytes]
    int32_t k, k_blocks, x_stride;
};

template <class C> __global__ void __launch_bounds__(C::threads) digitize_slots(const __grid_constant__ SlotsParams p) {
    using L = packed::DigitLayout<C>;
    constexpr int warps = C::threads / 32;
    static_assert(C::tile_m % warps == 0, "a warp a token");
    // The product reads tiles as soon as it starts: before inner values are there, not before routing has ended.
    if constexpr (C::of_tokens) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const int item = static_cast<int>(blockIdx.y), token = static_cast<int>(blockIdx.z) * warps + static_cast<int>(ptx::warp_id()), first = static_cast<int>(blockIdx.x) * C::at_once;
    const uint4 found = ptx::ld_global_cg_v4(p.token_tile + item);
    const int count = static_cast<int>(ptx::ld_global_cg_u32(p.token_tile_count));
    const int slot = static_cast<int>(found.z + (item - found.y) * C::tile_m) + token;
    if constexpr (!C::of_tokens) ptx::griddepcontrol_wait();
    if (item >= count || slot >= static_cast<int>(found.z + found.w)) return;
    const int row = C::of_tokens ? static_cast<int>(ptx::ld_global_cg_u32(p.token + slot)) : slot;
    const uint16_t* x = p.x + static_cast<size_t>(row) * p.x_stride;
    packed::BlockOfX<C> blocks[C::at_once];
    UNROLL for (int i = 0; i < C::at_once; i++) blocks[i].load(first + i < p.k_blocks ? x : nullptr, nullptr, p.k, first + i);
    UNROLL for (int i = 0; i < C::at_once; i++)
        if (first + i < p.k_blocks) blocks[i].store(token, p.digits + (static_cast<size_t>(item) * p.k_blocks + first + i) * L::block_bytes);
}

#endif  // ANYBIT_DIGITIZE_SLOTS_CUH
