// The weights of the product that follows, asked for while this kernel still runs: memory stands idle between two kernels,
// from the last weights of one to the first of the next, and a model knows which weights come next.
//
// A launch names a range of global memory; its blocks deal its pieces among themselves and ask L2 for them. Nothing is
// waited for, and nothing that the kernel computes depends on it. Params of a kernel that does this end with
//     const uint8_t* next;  int32_t next_piece, next_count, next_parts, next_stride, next_moment, next_pace;
#ifndef ANYBIT_UPCOMING_CUH
#define ANYBIT_UPCOMING_CUH

#include "ptx.cuh"

// Thread `one` of `all` in the grid that ask. Pieces go round the parts: the heads of all parts come first.
template <class P>
struct Upcoming {
    const P& p;
    int at;
    const int step;

    PTX Upcoming(const P& p, int one, int all) : p(p), at(one), step(all) {}
    PTX void ask(int most) {
        for (; most > 0 && at < p.next_count; most--, at += step) {
            const int part = at & ((1 << p.next_parts) - 1), piece = at >> p.next_parts;
            ptx::cp_async_bulk_prefetch_L2(p.next + static_cast<size_t>(part) * p.next_stride + static_cast<size_t>(piece) * p.next_piece,
                                           p.next_piece);
        }
    }
    PTX void ask() { ask(p.next_count); }
};

#endif  // ANYBIT_UPCOMING_CUH
