// From the accumulators of a warpgroup (64 weights x `tokens` tokens) to Y: terms, scales, and whole lines of memory.
#ifndef ANYBIT_BITWISE_WRITE_CUH
#define ANYBIT_BITWISE_WRITE_CUH

#include "bitwise_terms.cuh"

// A thread owns weights row + 16 * warp + lane / 4 (+ 8) and, of every eight tokens, 2 * (lane % 4) and the next. Weights'
// constants stay in registers; tokens' go through shared memory, {scale, term} of a token in eight bytes. 16-bit results
// are transposed by stmatrix through two staging buffers of `slab` tokens x 64 weights, so that a token's 64 weights
// leave as one line of 128 bytes; 32-bit results fill whole sectors straight from registers.
template <class Config> struct Writer {
    using T = Terms<Config>;
    static constexpr int tokens = Config::tokens, slab = Config::slab;
    static constexpr bool narrow = T::narrow;
    static constexpr int pitch = 144;  // of a staged token: eight of them lie in different banks
    static constexpr int buffer_bytes = narrow ? slab * pitch : 0;
    static constexpr int columns = 2 * buffer_bytes, zeros = columns + 8 * tokens;
    static constexpr int bytes = zeros + (T::asym_x ? 4 * tokens : 0);
    static constexpr int fetched = (tokens + 127) / 128;  // columns that a thread brings

    uint32_t shared;
    int thread, barrier, turn = 0;  // of the staging buffers
    typename T::Row row[2];
    typename T::Column fetch_column[fetched];
    bool aligned;

    PTX Writer(const Params& p, uint32_t shared, int warpgroup)
        : shared(shared), thread(threadIdx.x % 128), barrier(3 + warpgroup), aligned(p.n % 8 == 0 && p.y_stride % 8 == 0 && reinterpret_cast<uint64_t>(p.y) % 16 == 0) {}

    // Starts to load what the tile's results will need; the products that follow hide it.
    PTX void fetch(const Params& p, int n, int m) {
        const int at = n + 16 * (thread / 32) + (thread % 32) / 4;
        row[0] = T::row(p, at);
        row[1] = T::row(p, at + 8);
#pragma unroll
        for (int i = 0; i < fetched; i++) fetch_column[i] = T::column(p, m + thread + 128 * i);
    }

    struct Pair {  // the two tokens that a thread owns of eight
        uint4 terms;
        uint2 zeros;
    };
    PTX Pair pair(int eight) const {
        const int at = 8 * eight + 2 * (thread % 4);
        Pair c = {ptx::ld_shared_v4(shared + columns + 8 * at), {0u, 0u}};
        if constexpr (T::asym_x) c.zeros = ptx::ld_shared_v2(shared + zeros + 4 * at);
        return c;
    }
    static PTX typename T::Column column(const Pair& c, int which) {
        return which == 0 ? typename T::Column{__uint_as_float(c.terms.x), c.terms.y, c.zeros.x}
                          : typename T::Column{__uint_as_float(c.terms.z), c.terms.w, c.zeros.y};
    }

    PTX void write(const Params& p, const int32_t (&acc)[tokens / 2], int n, int m) {
        // Every thread of the warpgroup has passed the last barrier of the tile before, so the columns are free.
#pragma unroll
        for (int i = 0; i < fetched; i++) {
            const int at = thread + 128 * i;
            if (at >= tokens) break;
            ptx::st_shared_v2(shared + columns + 8 * at, {__float_as_uint(fetch_column[i].scale), fetch_column[i].term});
            if constexpr (T::asym_x) ptx::st_shared_u32(shared + zeros + 4 * at, fetch_column[i].zero);
        }
        ptx::bar_sync(barrier, 128);
        if constexpr (narrow)
            write_narrow(p, acc, n, m);
        else
            write_wide(p, acc, n, m);
    }

    PTX void write_narrow(const Params& p, const int32_t (&acc)[tokens / 2], int n, int m) {
        constexpr int eights = slab / 8;
        const int lane = thread % 32, warp = thread / 32;
        // stmatrix: lanes 8i to 8i + 7 address the rows (tokens) of matrix i; matrices are (rows, rows + 8) of two eights.
        const int stage_token = 8 * (lane / 16) + lane % 8, stage_piece = 2 * warp + (lane / 8) % 2;
        const uint32_t stage = shared + stage_token * pitch + stage_piece * 16;
        const int out_token = thread / 8, out_piece = thread % 8;
        const uint32_t out = shared + out_token * pitch + out_piece * 16;
        uint16_t* const y = static_cast<uint16_t*>(p.y);
        const bool lines = Config::bulk && aligned && n + 64 <= p.n;
        Pair c[eights];
#pragma unroll
        for (int i = 0; i < eights; i++) c[i] = pair(i);
#pragma unroll
        for (int first = 0; first < tokens; first += slab) {
            const uint32_t buffer = turn * buffer_bytes;
            turn ^= 1;
#pragma unroll
            for (int i = 0; i < eights; i += 2) {
                uint32_t packed[4];
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const int r = (first / 8 + i + u) * 4;
                    const typename T::Column c0 = column(c[i + u], 0), c1 = column(c[i + u], 1);
                    packed[2 * u] = T::pack(T::result(acc[r], row[0], c0), T::result(acc[r + 1], row[0], c1));
                    packed[2 * u + 1] = T::pack(T::result(acc[r + 2], row[1], c0), T::result(acc[r + 3], row[1], c1));
                }
                ptx::stmatrix_x4_trans(stage + buffer + i * 8 * pitch, packed);
            }
            if (first + slab < tokens) {
#pragma unroll
                for (int i = 0; i < eights; i++) c[i] = pair((first + slab) / 8 + i);  // in flight across the barrier
            }
            if (lines) {
                ptx::fence_proxy_async();
                if (thread < slab) ptx::cp_async_bulk_wait_group_read<0>();  // frees the other buffer
                ptx::bar_sync(barrier, 128);
                if (thread < slab && m + first + thread < p.m) {
                    ptx::cp_async_bulk_store(y + (m + first + thread) * p.y_stride + n, shared + buffer + thread * pitch, 128);
                    ptx::cp_async_bulk_commit_group();
                }
                continue;
            }
            ptx::bar_sync(barrier, 128);
            // The other buffer is written next: it was read before the barrier above.
#pragma unroll
            for (int i = 0; i < slab / 16; i++) {
                const int token = m + first + 16 * i + out_token, column = n + 8 * out_piece;
                if (token < p.m) store_piece(p, y + token * p.y_stride + column, column, ptx::ld_shared_v4(out + buffer + i * 16 * pitch));
            }
        }
    }

    // Shared memory must stand until everything has left it.
    PTX void finish() const {
        if (Config::bulk) ptx::cp_async_bulk_wait_group_read<0>();
    }

    // Eight weights of one token.
    PTX void store_piece(const Params& p, uint16_t* y, int n, uint4 v) const {
        if (aligned) {
            if (n < p.n) ptx::st_global_cs_v4(y, v);
            return;
        }
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (n + i < p.n) y[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }

    PTX void write_wide(const Params& p, const int32_t (&acc)[tokens / 2], int n, int m) {
        const int at = n + 16 * (thread / 32) + (thread % 32) / 4;
#pragma unroll
        for (int i = 0; i < tokens / 8; i++) {
            const Pair c = pair(i);
            const int token = m + 8 * i + 2 * (thread % 4);
#pragma unroll
            for (int e = 0; e < 4; e++) T::store(p, token + e % 2, at + 8 * (e / 2), acc[4 * i + e], row[e / 2], column(c, e % 2));
        }
        ptx::bar_sync(barrier, 128);  // the columns have been read
    }
};

#endif  // ANYBIT_BITWISE_WRITE_CUH
