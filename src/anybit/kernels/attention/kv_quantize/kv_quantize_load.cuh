// kv_quantize: loads 16 tokens at a time into a warp's registers, from the new tokens (k, v) or the 16-bit ring.
#ifndef ANYBIT_KV_QUANTIZE_LOAD_CUH
#define ANYBIT_KV_QUANTIZE_LOAD_CUH

#include "attention/kv_quantize/kv_quantize_tokens.cuh"

namespace kv_quantize {

// Register layout of 16 tokens, lane = 4 * g + t; a word is two channels of one token.
//   keys    x[h][j][p]: token g + 8 * h, channels 16 * j + 4 * t + 2 * p and the next
//   values  x[p][m]:    token g + 8 * p, channels 8 * m + 2 * t and the next; movmatrix transposes it to the page's order
// A warp reads each element once; ranges and codes are computed in registers.
template <class Config> struct Loader {
    using S = kv_page::Format<Config>;
    using From = Tokens<Config>;
    static constexpr int warps = Config::threads / 32, depth = Config::head_dim / 16;
    static constexpr int span = Config::head_dim > 128 ? 128 : Config::head_dim;  // channels of values per warp task
    static constexpr int pitch = span * 2 + 16;          // bytes per token in shared memory, padded
    static constexpr int bytes = warps * (16 * pitch + 16);

    // ---- addresses; `token` counts from the block's first
    DEVICE static const uint16_t* row(const From& from, int token) {  // a new token: in k or v
        return from.fresh + static_cast<int64_t>(from.begin - from.old + token) * from.token_stride;
    }
    DEVICE static void ring_tile(uint32_t (&w)[4], const From& from, int token, int j) {  // token: the tile's first
        int slot = from.slot + token;
        if (slot >= from.ring_tokens) slot -= from.ring_tokens;
        const uint4 v = ptx::ld_global_cg_v4(from.tile(slot) + (j * 32 + threadIdx.x % 32) * 8);
        w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
    }
    DEVICE static void ring_keys(uint32_t (&x)[2][2], const From& from, int token, int j) {
        uint32_t w[4];
        ring_tile(w, from, token, j);
        x[0][0] = w[0]; x[1][0] = w[1]; x[0][1] = w[2]; x[1][1] = w[3];
    }
    DEVICE static void put(uint32_t (&x)[2], const uint16_t* four) {  // four channels of a token
        const uint2 v = *reinterpret_cast<const uint2*>(four);
        x[0] = v.x; x[1] = v.y;
    }
    // Single-token steps: whether the new token is among those before `end` (as their last). All others are in the ring.
    DEVICE static bool newest_here(const From& from, int end) { return from.old - from.begin < end; }
    // Loads 16 * tiles tokens from `token` on, 16 channels.
    template <int tiles> DEVICE static void load_keys(uint32_t (&x)[tiles][2][2], const From& from, int token, int j) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (Config::single) {
            // Tiles are contiguous and wrap at the ring's end.
            if constexpr (Config::front > 0) {
                UNROLL for (int i = 0; i < tiles; ++i) ring_keys(x[i], from, token + 16 * i, j);
            } else {
                constexpr int step = 16 * Config::head_dim;
                const uint16_t* at = from.ring + (from.slot + token) * Config::head_dim + (j * 32 + lane) * 8;
                const uint16_t* again = at - from.ring_tokens * Config::head_dim;
                const int left = from.ring_tokens - from.slot - token;
                UNROLL for (int i = 0; i < tiles; ++i) {
                    const uint4 v = ptx::ld_global_cg_v4((16 * i < left ? at : again) + i * step);
                    x[i][0][0] = v.x; x[i][1][0] = v.y; x[i][0][1] = v.z; x[i][1][1] = v.w;
                }
            }
            if (newest_here(from, token + 16 * tiles) && g == 7) put(x[tiles - 1][1], from.fresh + 16 * j + 4 * t);
            return;
        }
        if (from.old <= from.begin + token) {  // all new (prefill)
            const uint16_t* at = row(from, token + g) + 16 * j + 4 * t;
            const int64_t step = static_cast<int64_t>(8) * from.token_stride;
            UNROLL for (int i = 0; i < 2 * tiles; ++i) put(x[i / 2][i % 2], at + i * step);
            return;
        }
        // All ring loads issue before anything waits; tiles that are partly new get their new rows afterwards.
        UNROLL for (int i = 0; i < tiles; ++i)
            if (from.old - from.begin - token - 16 * i > 0) ring_keys(x[i], from, token + 16 * i, j);
        UNROLL for (int i = 0; i < tiles; ++i) {
            const int held = from.old - from.begin - token - 16 * i;
            if (held < 16)
                UNROLL for (int h = 0; h < 2; ++h)
                    if (g + 8 * h >= held) put(x[i][h], row(from, token + 16 * i + g + 8 * h) + 16 * j + 4 * t);
        }
    }
    // Loads 16 tokens from `token` on, 16 * deep channels from channel tile `first` on.
    template <int deep> DEVICE static void load_tokens(uint32_t (&x)[deep][2][2], const From& from, int token, int first) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, held = from.old - from.begin - token;
        if (Config::single || held > 0)
            UNROLL for (int j = 0; j < deep; ++j) ring_keys(x[j], from, token, first + j);
        if constexpr (Config::single) {
            if (newest_here(from, token + 16) && g == 7)
                UNROLL for (int j = 0; j < deep; ++j) put(x[j][1], from.fresh + 16 * (first + j) + 4 * t);
            return;
        }
        if (held < 16)
            UNROLL for (int h = 0; h < 2; ++h)
                if (g + 8 * h >= held) {
                    const uint16_t* at = row(from, token + g + 8 * h) + 16 * first + 4 * t;
                    UNROLL for (int j = 0; j < deep; ++j) put(x[j][h], at + 16 * j);
                }
    }
    DEVICE static void ring_values(uint32_t (&x)[2][span / 8], const From& from, int token, int first) {
        uint32_t w[span / 16][4];
        UNROLL for (int j = 0; j < span / 16; ++j) ring_tile(w[j], from, token, first / 16 + j);
        UNROLL for (int j = 0; j < span / 16; ++j)
            UNROLL for (int k = 0; k < 4; ++k) x[k / 2][2 * j + k % 2] = ptx::movmatrix_trans(w[j][k]);
    }
    // Loads channels first .. first + span - 1 of 16 tokens; new tokens go through shared memory (ldmatrix).
    DEVICE static void load_values(uint32_t (&x)[2][span / 8], const From& from, int token, int first) {
        const int lane = threadIdx.x % 32, g = lane / 4, held = from.old - from.begin - token;
        const uint32_t stage = ptx::shared_address(ptx::dynamic_shared()) + threadIdx.x / 32 * (16 * pitch);
        if constexpr (Config::single) {
            ring_values(x, from, token, first);
            if (newest_here(from, token + 16) && g == 7)
                UNROLL for (int m = 0; m < span / 8; ++m) x[1][m] = *reinterpret_cast<const uint32_t*>(from.fresh + first + 8 * m + 2 * (lane % 4));
            return;
        }
        if (held < 16) {
            constexpr int pieces = span / 8;  // 16-byte pieces per token
            __syncwarp();
            if (held <= 0 && 32 % pieces == 0) {  // all new (prefill)
                const uint16_t* at = row(from, token + lane / pieces) + first + lane % pieces * 8;
                const int64_t step = static_cast<int64_t>(32 / pieces) * from.token_stride;
                UNROLL for (int i = 0; i < 16 * pieces / 32; ++i)
                    ptx::cp_async<16>(stage + (lane / pieces + i * (32 / pieces)) * pitch + lane % pieces * 16, at + i * step);
            } else {
                for (int i = lane; i < 16 * pieces; i += 32)
                    if (i / pieces >= held)
                        ptx::cp_async<16>(stage + i / pieces * pitch + i % pieces * 16, row(from, token + i / pieces) + first + i % pieces * 8);
            }
        }
        if (held > 0) {
            ring_values(x, from, token, first);
        }
        if (held < 16) {
            ptx::cp_async_wait_all();
            __syncwarp();
            UNROLL for (int p = 0; p < 2; ++p) {
                const bool take = g + 8 * p >= held;
                if (8 * p + 8 <= held) continue;
                UNROLL for (int m = 0; m < span / 8; m += 4) {
                    // Rows held by the ring were not copied: clamp ldmatrix addresses to rows that were.
                    const int r = max(8 * p + lane % 8, min(held, 15));
                    uint32_t w[4];
                    ptx::ldmatrix_x4(w, stage + r * pitch + 16 * (m + lane / 8));
                    UNROLL for (int k = 0; k < 4; ++k)
                        if (take) x[p][m + k] = w[k];
                }
            }
        }
    }
};

}  // namespace kv_quantize

#endif  // ANYBIT_KV_QUANTIZE_LOAD_CUH
