// TMA tensor copies: a box of a row-major global matrix to shared memory, swizzled on the way.
// See base.cuh for the conventions. The host encodes the map (TensorMap, 128 opaque bytes) and passes it by value.
// Out-of-bounds elements are zero-filled, and a box always counts its full bytes on the mbarrier.
#ifndef ANYBIT_PTX_TMA_CUH
#define ANYBIT_PTX_TMA_CUH

#include "common/ptx/base.cuh"

namespace ptx {

struct alignas(128) TensorMap {
    uint64_t words[16];
};

CHECKED void prefetch_tensormap(const TensorMap* map) {
    NEEDS(900, "tensor maps need sm_90 or later");
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
// The box whose first element is column x of row y.
CHECKED void cp_async_bulk_tensor_2d(uint32_t shared, const TensorMap* map, int x, int y, uint32_t barrier) {
    NEEDS(900, "tensor maps need sm_90 or later");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
// Multicast: to the same offset, signalling the mbarrier at the same offset, in every CTA whose bit is set.
CHECKED void cp_async_bulk_tensor_2d_multicast(
    uint32_t shared, const TensorMap* map, int x, int y, uint32_t barrier, uint16_t blocks) {
    NEEDS(900, "tensor maps need sm_90 or later");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(shared), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks) : "memory");
}
// Stores a box, clipped to the matrix. Commit and wait as for cp_async_bulk_store.
CHECKED void cp_async_bulk_tensor_store_2d(const TensorMap* map, int x, int y, uint32_t shared) {
    NEEDS(900, "tensor maps need sm_90 or later");
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(map), "r"(x), "r"(y), "r"(shared) : "memory");
}

}  // namespace ptx

#endif  // ANYBIT_PTX_TMA_CUH
