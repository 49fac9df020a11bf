// Shared by the bit-plane kernels for many tokens: the epilogue, a warpgroup's accumulators (64 weights x `tokens` tokens) to Y,
// with zero terms and scales applied; and the layout of shared memory, consumers and roles of threads.
#ifndef ANYBIT_BITPLANE_EPILOGUE_CUH
#define ANYBIT_BITPLANE_EPILOGUE_CUH

#include "bitplane/bitplane_terms.cuh"

// A warpgroup's staging memory: `epilogue_stages` buffers of `epilogue_tile` tokens x 64 16-bit results, in TMA's 128-byte
// swizzle, then two tiles' token constants (double-buffered). A buffer has two mbarriers: filled, read.
template <class Config> struct EpilogueShared {
    using T = Terms<Config>;
    static constexpr int tokens = Config::tile_m, epilogue_tile = Config::epilogue_tile, buffers = Config::epilogue_stages;
    static constexpr int pitch = 128, buffer_bytes = T::is_16bit ? epilogue_tile * pitch : 0;
    static constexpr int columns = buffers * buffer_bytes, zeros = 8 * tokens, column_bytes = zeros + (T::asym_x ? 4 * tokens : 0);
    static constexpr int bytes = (columns + 2 * column_bytes + 1023) / 1024 * 1024;
    static constexpr int barrier_bytes = 16 * buffers;

    uint32_t shared, barriers;
    DEVICE uint32_t filled(int buffer) const { return barriers + 16 * buffer; }
    DEVICE uint32_t read(int buffer) const { return filled(buffer) + 8; }
};

// A thread owns weights row + 16 * warp + lane / 4 (+ 8) and, of every eight tokens, 2 * (lane % 4) and the next. Weight
// constants stay in registers; token constants go through shared memory, {scale, term} in eight bytes. 16-bit results are
// transposed by stmatrix, so that a token's 64 weights are one 128-byte line, and another warp stores whole buffers by TMA
// (store_results); without TMA stores (rows of Y not 16-byte aligned) the threads store 16-byte pieces. 32-bit results go
// straight from registers, in whole sectors.
template <class Config> struct Epilogue {
    using T = Terms<Config>;
    using S = EpilogueShared<Config>;
    static constexpr int tokens = Config::tile_m, epilogue_tile = Config::epilogue_tile, eights = epilogue_tile / 8;
    static constexpr int fetched = (tokens + 127) / 128;  // token constants loaded per thread

    S shared;
    int thread, barrier, buffer = 0, parity = 1;
    uint32_t columns;  // this tile's token constants
    typename T::RowLoad row_load[2];
    typename T::ColumnLoad column_load[fetched];

    DEVICE Epilogue(S shared, int warpgroup) : shared(shared), thread(threadIdx.x % 128), barrier(3 + warpgroup), columns(shared.shared + S::columns) {}

    // Issues the loads of a tile's constants; the main loop hides their latency.
    DEVICE void fetch(const Params& p, int n, int m) {
        const int at = n + 16 * (thread / 32) + (thread % 32) / 4;
        row_load[0] = T::load_row(p, at);
        row_load[1] = T::load_row(p, at + 8);
        UNROLL for (int i = 0; i < fetched; i++) column_load[i] = T::load_column(p, m + thread + 128 * i);
    }

    struct Pair {  // a thread's two tokens of eight
        uint4 terms;
        uint2 zeros;
    };
    DEVICE Pair pair(int eight) const {
        const int at = 8 * eight + 2 * (thread % 4);
        Pair c = {ptx::ld_shared_v4(columns + 8 * at), {0u, 0u}};
        if constexpr (T::asym_x) c.zeros = ptx::ld_shared_v2(columns + S::zeros + 4 * at);
        return c;
    }
    static DEVICE typename T::Column column(const Pair& c, int which) {
        return which == 0 ? typename T::Column{__uint_as_float(c.terms.x), c.terms.y, c.zeros.x}
                          : typename T::Column{__uint_as_float(c.terms.z), c.terms.w, c.zeros.y};
    }

    // Double-buffered: the previous tile uses the other half, and every thread that passed the previous tile's barrier has
    // read the constants of the tile before that.
    DEVICE void stage_columns() {
        columns = 2 * (shared.shared + S::columns) + S::column_bytes - columns;
        UNROLL for (int i = 0; i < fetched; i++) {
            const int at = thread + 128 * i;
            if (at >= tokens) break;
            const typename T::Column c = T::column(column_load[i]);
            ptx::st_shared_v2(columns + 8 * at, {__float_as_uint(c.scale), c.term});
            if constexpr (T::asym_x) ptx::st_shared_u32(columns + S::zeros + 4 * at, c.zero);
        }
        ptx::bar_sync(barrier, 128);
    }

    // Where this thread's stmatrix writes a staging buffer: lanes 8i to 8i + 7 address the rows (tokens) of matrix i; matrices:
    // rows, rows + 8 of two token octets.
    DEVICE uint32_t stage(int lane, int warp) const {
        const int token = 8 * (lane / 16) + lane % 8, piece = (2 * warp + (lane / 8) % 2) ^ (lane % 8);
        return shared.shared + token * S::pitch + piece * 16;
    }
    // Packs the results of a buffer's octet i, the sums of octet `from`.
    template <int sums>
    static DEVICE void pack(uint32_t (&packed)[eights / 2][4], int i, const int32_t (&value)[sums], int from, const typename T::Row (&row)[2], const Pair& c) {
        const int r = from * 4;
        const typename T::Column c0 = column(c, 0), c1 = column(c, 1);
        packed[i / 2][2 * (i % 2)] = T::pack(T::result(value[r], row[0], c0), T::result(value[r + 1], row[0], c1));
        packed[i / 2][2 * (i % 2) + 1] = T::pack(T::result(value[r + 2], row[1], c0), T::result(value[r + 3], row[1], c1));
    }
    // Writes a buffer; by_tma: which another warp stores.  leader: one lane of a warp.
    template <bool by_tma> DEVICE void leave(uint32_t stage, const uint32_t (&packed)[eights / 2][4], bool leader) {
        if constexpr (by_tma) ptx::mbarrier_wait_parity(shared.read(buffer), parity);
        UNROLL for (int i = 0; i < eights / 2; i++) ptx::stmatrix_x4_trans(stage + buffer * S::buffer_bytes + i * 16 * S::pitch, packed[i]);
        if constexpr (by_tma) {
            ptx::fence_proxy_async();
            __syncwarp();
            if (leader) ptx::mbarrier_arrive(shared.filled(buffer));
            if (++buffer == S::buffers) buffer = 0, parity ^= 1;
        }
    }

    // Writes the first `width` tokens of a tile.
    template <int width> DEVICE void write(const Params& p, const int32_t (&acc)[width / 2], int n, int m) {
        const typename T::Row row[2] = {T::row(row_load[0]), T::row(row_load[1])};
        if constexpr (T::is_16bit)
            write_16bit<width>(p, acc, row, n, m);
        else
            write_32bit<width>(p, acc, row, n, m);
    }

    template <int width> DEVICE void write_16bit(const Params& p, const int32_t (&acc)[width / 2], const typename T::Row (&row)[2], int n, int m) {
        const uint32_t stage = this->stage(thread % 32, thread / 32);
        Pair c[eights];
        UNROLL for (int i = 0; i < eights; i++) c[i] = pair(i);
        UNROLL for (int first = 0; first < width; first += epilogue_tile) {
            uint32_t packed[eights / 2][4];
            UNROLL for (int i = 0; i < eights; i++) pack(packed, i, acc, first / 8 + i, row, c[i]);
            leave<Config::tma_store>(stage, packed, thread % 32 == 0);
            if (first + epilogue_tile < width) {
                UNROLL for (int i = 0; i < eights; i++) c[i] = pair((first + epilogue_tile) / 8 + i);  // issued after the fence, which would wait for them
            }
            if constexpr (!Config::tma_store) {
                ptx::bar_sync(barrier, 128);
                store_pieces(p, n, m + first);
                buffer ^= 1;  // the barrier above orders the other buffer's reads
            }
        }
    }

    // Stores a buffer without TMA: a thread stores eight weights of every sixteenth token.
    DEVICE void store_pieces(const Params& p, int n, int m) const {
        const int column = n + thread % 8 * 8;
        const bool aligned = p.y_stride % 8 == 0 && reinterpret_cast<uint64_t>(p.y) % 16 == 0;
#pragma unroll 1
        for (int token = thread / 8; token < epilogue_tile && m + token < p.m; token += 16) {
            const uint32_t at = shared.shared + buffer * S::buffer_bytes + token * S::pitch + (thread % 8 ^ token % 8) * 16;
            uint16_t* const y = static_cast<uint16_t*>(p.y) + (m + token) * p.y_stride + column;
            const uint4 v = ptx::ld_shared_v4(at);
            if (aligned && column + 8 <= p.n) {
                ptx::st_global_cs_v4(y, v);
                continue;
            }
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int i = 0; i < 8; i++)
                if (column + i < p.n) y[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
        }
    }

    template <int width> DEVICE void write_32bit(const Params& p, const int32_t (&acc)[width / 2], const typename T::Row (&row)[2], int n, int m) {
        const int at = n + 16 * (thread / 32) + (thread % 32) / 4;
        UNROLL for (int i = 0; i < width / 8; i++) {
            const Pair c = pair(i);
            const int token = m + 8 * i + 2 * (thread % 4);
            UNROLL for (int e = 0; e < 4; e++) T::store(p, token + e % 2, at + 8 * (e / 2), acc[4 * i + e], row[e / 2], column(c, e % 2));
        }
    }
};

// Shared memory of a kernel for many tokens: slots of 128 rows of a weight plane, slots of activations, then per warpgroup
// staging buffers and columns, then mbarriers.
template <class Config, int weights, int activations, int planes_per_slot> struct LargeShared {
    static constexpr int rows = 128, weight_slots = weights, activation_slots = activations;
    static constexpr int weight_slot = rows * planes::row_bytes, plane = Config::tile_m * planes::row_bytes;
    static constexpr int activation_slot = planes_per_slot * plane;
    static constexpr int first_activations = weight_slots * weight_slot, epilogues = first_activations + activation_slots * activation_slot;
    using W = EpilogueShared<Config>;
    static constexpr int barriers = epilogues + 2 * W::bytes, epilogue_barriers = barriers + 16 * (weight_slots + activation_slots);
    static_assert(epilogue_barriers + 2 * W::barrier_bytes == Config::shared_bytes, "the kernel's shared_bytes() disagrees");

    static DEVICE uint32_t weight_full(uint32_t shared, int slot) { return shared + barriers + 16 * slot; }
    static DEVICE uint32_t weight_empty(uint32_t shared, int slot) { return weight_full(shared, slot) + 8; }
    static DEVICE uint32_t activation_full(uint32_t shared, int slot) { return weight_full(shared, weight_slots + slot); }
    static DEVICE uint32_t activation_empty(uint32_t shared, int slot) { return activation_full(shared, slot) + 8; }
    static DEVICE W epilogue(uint32_t shared, int warpgroup) {
        return {shared + epilogues + warpgroup * W::bytes, shared + epilogue_barriers + warpgroup * W::barrier_bytes};
    }
};

// A consumer warpgroup: pipeline state and epilogue.
template <class Config, class Shared, int weight_groups, int activation_groups> struct LargeConsumer {
    using S = Shared;
    const Params& p;
    uint32_t shared;
    int warpgroup;
    bool leader;
    Epilogue<Config> epilogue;
    Ring<weight_groups> weights;
    Ring<activation_groups> activations;

    DEVICE LargeConsumer(const Params& p, uint32_t shared, int warpgroup)
        : p(p), shared(shared), warpgroup(warpgroup), leader(ptx::lane_id() == 0), epilogue(S::epilogue(shared, warpgroup), warpgroup) {}
    DEVICE void release_weights(int slot) const {
        if (leader) ptx::mbarrier_arrive(S::weight_empty(shared, slot));
    }
    DEVICE void release_activations(int slot, bool used = true) const {
        if (leader && used) ptx::mbarrier_arrive(S::activation_empty(shared, slot));
    }
    // Advances a descriptor by a 32-bit add: wgmmas then issue back to back.
    static DEVICE uint64_t at(uint64_t descriptor, uint32_t bytes) {
        return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
    }
};

// TMA store loop of one thread, over the buffers that a warpgroup fills. A buffer is released after the next store has been
// issued, so that waiting for its read rarely stalls: with three or more buffers the warpgroup never waits.
template <class Config, class Shared, class Tiles> DEVICE void store_results(const Params& p, uint32_t shared, int warpgroup) {
    using W = EpilogueShared<Config>;
    const W epilogue = Shared::epilogue(shared, warpgroup);
    int buffer = 0, parity = 0, previous = -1;
    for (Tiles tiles(p); tiles.more(); tiles.next()) {
        const int token = tiles.token(), row = tiles.row() + 64 * warpgroup;
#pragma unroll 1
        for (int first = 0; first < Config::tile_m; first += Config::epilogue_tile) {
            ptx::mbarrier_wait_parity(epilogue.filled(buffer), parity);
            if (token + first < p.m && row < p.n)
                ptx::cp_async_bulk_tensor_store_2d(&p.y_map, row, token + first, epilogue.shared + buffer * W::buffer_bytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<1>();
            if (previous >= 0) ptx::mbarrier_arrive(epilogue.read(previous));
            previous = buffer;
            if (++buffer == W::buffers) buffer = 0, parity ^= 1;
        }
    }
    ptx::cp_async_bulk_wait_group_read<0>();  // the CTA must not exit before its shared memory has been read
}

// A CTA's threads: two warpgroups multiply; of the third, one thread loads, and one for each of the others stores its results.
template <class Config, class S, class Tiles, bool by_tma, class Load, class Multiply>
DEVICE void run_large(const Params& p, Load&& load, Multiply&& multiply) {
    static_assert(Config::threads == 384, "two warpgroups that multiply, and one whose threads load and store");
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());
    if (threadIdx.x == 256) {
        for (int slot = 0; slot < S::weight_slots + S::activation_slots; slot++) {
            ptx::mbarrier_init(S::weight_full(shared, slot), 1);
            ptx::mbarrier_init(S::weight_empty(shared, slot), 8);  // every consumer warp
        }
        for (int buffer = 0; buffer < 2 * S::W::buffers; buffer++) {
            const typename S::W epilogue = S::epilogue(shared, buffer % 2);
            ptx::mbarrier_init(epilogue.filled(buffer / 2), 4);  // every warp of the warpgroup
            ptx::mbarrier_init(epilogue.read(buffer / 2), 1);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x >= 256) {
        ptx::setmaxnreg_dec<40>();
        if (threadIdx.x == 256) load(shared);
        if constexpr (by_tma) {
            if (threadIdx.x == 288 || threadIdx.x == 320) store_results<Config, S, Tiles>(p, shared, (threadIdx.x - 288) / 32);
        }
    } else {
        ptx::setmaxnreg_inc<232>();
        multiply(shared);
    }
}

#endif  // ANYBIT_BITPLANE_EPILOGUE_CUH
