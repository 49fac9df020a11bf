// Activations of the kernels for few tokens, from global to shared memory.
#ifndef ANYBIT_PACKED_ACTIVATIONS_CUH
#define ANYBIT_PACKED_ACTIVATIONS_CUH

#include "packed/packed_params.cuh"

namespace packed {

// One thread's part, of `threads`, of loading a k block of the activations into a slot: [token][128 columns], `pitch` bytes a
// token. By cp.async, unless columns are gathered: in any order, at any alignment.
template <class C, int element, int pitch, int threads> DEVICE void load_activations(const Params& p, uint32_t slot, int k_block, int thread) {
    constexpr int block_bytes = 128 * element;
    if constexpr (C::gather) {
        for (int i = thread; i < C::tile_m * (block_bytes / 4); i += threads) {
            const int token = i / (block_bytes / 4), word = i % (block_bytes / 4);
            uint32_t v = 0;
            if (token < p.m) {
                UNROLL for (int e = 0; e < 4 / element; e++) {
                    const int column = k_block * 128 + word * (4 / element) + e;
                    const int channel = p.permutation != nullptr ? p.permutation[column] : column < p.k ? column : -1;
                    if (channel >= 0) {
                        const size_t at = static_cast<size_t>(token) * p.x_stride + channel;
                        const uint32_t code = element == 1 ? p.x[at] : reinterpret_cast<const uint16_t*>(p.x)[at];
                        v |= code << (8 * element * e);
                    }
                }
            }
            ptx::st_shared_u32(slot + token * pitch + word * 4, v);
        }
    } else {
        // Rows past the last token stay stale: each only affects its own column of the MMA.
        constexpr int chunks = block_bytes / 16, step = threads / chunks;
        const int first = thread / chunks, at = k_block * block_bytes + thread % chunks * 16;
        const int row_bytes = p.x_stride * element, left = p.k * element - at, valid = left < 0 ? 0 : left < 16 ? left : 16;
        const uint8_t* from = p.x + static_cast<size_t>(first) * row_bytes + at;
        const uint32_t to = slot + first * pitch + thread % chunks * 16;
        UNROLL for (int i = 0; i < (C::tile_m + step - 1) / step; i++)
            if (first + i * step < C::tile_m && first + i * step < p.m) {
                if constexpr (C::ragged)
                    ptx::cp_async<16>(to + i * step * pitch, valid > 0 ? from + static_cast<size_t>(i * step) * row_bytes : p.x, valid);
                else
                    ptx::cp_async<16>(to + i * step * pitch, from + static_cast<size_t>(i * step) * row_bytes);
            }
    }
}

}  // namespace packed

#endif
