// The example of docs/writing-kernels.md: one warp sums one row of a float matrix and scales the sum.
#include "common/ptx/base.cuh"

struct Params {
    const float* x;  // [rows, columns]
    float* y;        // [rows]
    int rows;
    int columns;
    float scale;
};

template <class Config>
__global__ void __launch_bounds__(Config::threads) row_sums(const __grid_constant__ Params p) {
    constexpr int chunk = Config::columns_a_step;
    static_assert(Config::shared_bytes == Config::threads / 32 * chunk * 4, "one chunk of floats a warp");
    const int warp = ptx::warp_id(), lane = ptx::lane_id();
    const int row = blockIdx.x * (Config::threads / 32) + warp;
    if (row >= p.rows) return;
    float* staged = reinterpret_cast<float*>(ptx::dynamic_shared()) + warp * chunk;
    float sum = 0;
    for (int first = 0; first < p.columns; first += chunk) {
        for (int i = lane; i < chunk; i += 32) {  // past the end of the row nothing is read: zeros arrive
            const int column = first + i;
            const bool inside = column < p.columns;
            ptx::cp_async<4>(ptx::shared_address(staged + i), p.x + (inside ? row * p.columns + column : 0), inside ? 4 : 0);
        }
        ptx::cp_async_wait_all();
        __syncwarp();
        for (int i = 0; i < chunk / 32; i++) sum += staged[(lane + 1) % 32 + 32 * i];
        __syncwarp();  // the next step overwrites what other lanes read here
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
    if (lane == 0) p.y[row] = p.scale * sum;
}
