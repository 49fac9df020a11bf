// Writes ids, as a router does just before experts: it lets them start early, and waits for the kernel before it.
#include "common/ptx/base.cuh"

struct IdsParams {
    const int32_t* source;
    int32_t* target;
    int32_t count;
};

template <class Config> __global__ void write_ids(const __grid_constant__ IdsParams p) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < p.count; i += gridDim.x * blockDim.x) p.target[i] = p.source[i];
}
