// Element order of the ring of 16-bit tokens (the residual) of a KV cache. Twin: kv_page.ring_places.
#ifndef ANYBIT_KV_RING_CUH
#define ANYBIT_KV_RING_CUH

#include "common/ptx/base.cuh"

namespace kv_ring {

// Element offset of slot s, channel c, for the keys or the values: 16 x 16 tiles in MMA fragment order.
DEVICE int place(bool values, int s, int c, int head_dim) {
    const int tile = s / 16 * (head_dim / 16) + c / 16;
    return values ? (tile * 32 + c % 8 * 4 + s % 8 / 2) * 8 + (s % 16 / 8 * 2 + c % 16 / 8) * 2 + s % 2
                  : (tile * 32 + s % 8 * 4 + c % 16 / 4) * 8 + (c % 4 / 2 * 2 + s % 16 / 8) * 2 + c % 2;
}

}  // namespace kv_ring

#endif  // ANYBIT_KV_RING_CUH
