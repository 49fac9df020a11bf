// Partial softmax state (over some of the keys), and the merge of partial states.
#ifndef ANYBIT_SOFTMAX_CUH
#define ANYBIT_SOFTMAX_CUH

#include "common/ptx/base.cuh"

namespace softmax {

constexpr float lowest = -1e30f;  // below every logit but finite, so that lowest - lowest is not NaN

// Logits are in units of log2: `sum` is the sum of 2^(logit - reference). The output is divided by `sum` only at the
// end, so that merging is a multiplication by `weight`.
struct State {
    float reference = lowest;
    float sum = 0.0f;

    // Rescaling factor from `reference` to a newer reference, which must not be smaller.
    DEVICE static float weight(float reference, float newer) { return ptx::ex2_approx(reference - newer); }

    // Adds an attention sink: a logit without a value.
    DEVICE void add_sink(float logit) {
        const float newer = fmaxf(reference, logit);
        sum = sum * weight(reference, newer) + weight(logit, newer);
        reference = newer;
    }
    // 1 / sum, or 0 for an empty sum.
    DEVICE float normalizer() const { return sum == 0.0f ? 0.0f : ptx::rcp_approx(sum); }
    // Natural logarithm of the sum of exponentials; -inf for an empty sum.
    DEVICE float log_sum_exp() const { return (reference + ptx::lg2_approx(sum)) * 0.69314718f; }
};

// Merges one state per lane (State{} where there is none); returns this lane's weight in the merged state.
DEVICE float merge_lanes(State& state) {
    float most = state.reference;
    UNROLL for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
    const float weight = State::weight(state.reference, most);
    float sum = weight * state.sum;
    UNROLL for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    state.reference = most;
    state.sum = sum;
    return weight;
}

}  // namespace softmax

#endif  // ANYBIT_SOFTMAX_CUH
