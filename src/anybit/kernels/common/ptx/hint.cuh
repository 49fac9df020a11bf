// Stores that say how long L2 should keep what they write. See ptx.cuh for the conventions.
#ifndef ANYBIT_PTX_HINT_CUH
#define ANYBIT_PTX_HINT_CUH

#include "common/ptx/tma.cuh"

namespace ptx {

CHECKED void cp_async_bulk_tensor_store_2d_hint(const TensorMap* map, int x, int y, uint32_t shared, uint64_t policy) {
    NEEDS(900, "tensor maps need sm_90 or later");
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;"
                 :: "l"(map), "r"(x), "r"(y), "r"(shared), "l"(policy) : "memory");
}

}  // namespace ptx

#endif  // ANYBIT_PTX_HINT_CUH
