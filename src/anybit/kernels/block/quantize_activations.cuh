// Dynamic per-token activation quantization: [M, K] in 16 bits -> codes of 1 to 8 bits, packed as the GEMMs read them.
// Formulas are those of anybit.codes.reference.quantize_activations, operation for operation, so that codes agree bit for bit.
//
// One CTA per token, whose values stay in registers between finding the scale and coding: the input is read once.
// A thread owns vectors of 8 consecutive values, `threads` vectors apart, so that loads and stores coalesce.
#ifndef ANYBIT_QUANTIZE_ACTIVATIONS_CUH
#define ANYBIT_QUANTIZE_ACTIVATIONS_CUH

#include "common/ptx/base.cuh"
#include "bitplane/bitplane_layout.cuh"
#include "block/rotation.cuh"
#include "common/values.cuh"

// Fused prologue. plain: x itself.  rms_norm: gamma * x / rms(x), of x + residual if given.  silu_mul: silu(gate) * up.
enum class Source { plain, rms_norm, silu_mul };
// planes: bit planes (bitplane_layout.cuh).  bytes: one per value, signed (code - 2^(bits-1)) or e4m3.
enum class Target { planes, bytes };

struct Params {
    const uint16_t* x;         // [M, K], or [M, gate K | up K] for silu_mul
    const uint16_t* residual;  // rms_norm: added to x first; or null
    uint16_t* residual_sum;    // rms_norm: output x + residual; or null
    const uint16_t* gamma;     // rms_norm: [K]
    uint8_t* codes;            // bit planes (bitplane_layout.cuh), or one byte per value, rows of padded_k bytes
    float* scale;              // [M]
    int32_t* sum;              // [M]: sum of the codes over K, for the GEMM's rank-1 zero-point terms
    int32_t* zero;             // [M]: asym only
    int64_t x_stride, residual_stride;  // elements between rows
    int32_t k;
    int32_t padded_k;          // planes: K rounded up to whole chunks; bytes: the row pitch, at least K
    int32_t padded_rows;       // planes: M rounded up to a multiple of 8
    float epsilon;
    float factor;              // rotation: 1 / sqrt(K)
    const uint32_t* signs;     // rotation: in rotation.cuh's format
};

namespace pack {

using namespace values;

// ---- Coding --------------------------------------------------------------------------------------------------------------

struct Scale {
    float inverse, zero;
    float range, steps;  // scale = range / steps
    bool finite;

    DEVICE float value() const { return finite ? range / steps : __uint_as_float(0x7fc00000u); }
};

// 1.5 * 2^23: adding it leaves the integer in the low bits (two's complement), rounded to nearest even like rint.
constexpr float magic = 12582912.f;
constexpr uint32_t magic_bits = 0x4b400000u;

DEVICE float safe_ratio(float numerator, float denominator) {
    const float quotient = numerator / denominator;
    return denominator > 0.f && quotient < __uint_as_float(0x7f800000u) ? quotient : 0.f;
}

// largest: bits of the largest magnitude; asym: of the maximum (>= 0), with `lowest` those of the minimum's magnitude.
template <Code code, int bits, bool is_bf16> DEVICE Scale find_scale(uint32_t largest, uint32_t lowest, float mean) {
    constexpr float top = static_cast<float>((1 << bits) - 1);
    Scale s;
    s.finite = largest < infinity_bits<is_bf16> && lowest < infinity_bits<is_bf16>;
    s.range = float_of_bits<is_bf16>(largest);
    s.zero = 0.f;
    if constexpr (code == Code::asym) {
        const float low = float_of_bits<is_bf16>(lowest);
        s.range += low;
        s.steps = top;
        s.inverse = safe_ratio(top, s.range);
        s.zero = fminf(rintf(low * s.inverse), top);
    } else {
        constexpr float most = bits > 1 ? static_cast<float>((1 << (bits - 1)) - 1) : 1.f;
        s.steps = code == Code::bipolar ? top * 0.5f : code == Code::e4m3 ? 448.f : most;
        s.inverse = safe_ratio(s.steps, s.range);
        if constexpr (code == Code::bipolar && bits == 1) {
            s.range = mean;
            s.steps = 0.5f;
        }
    }
    return s;
}

// One value's code in the low byte (upper bits are garbage). `offset` is added to the signed integer.
template <Code code, int bits, int offset> DEVICE uint32_t encode(float v, const Scale& s) {
    const float scaled = ptx::mul_rn_f32(v, s.inverse);
    // Fold the offset into the magic number where it can't change ties: floor has none, and even offsets keep parity.
    constexpr float biased = magic + static_cast<float>(offset);
    if constexpr (code == Code::bipolar) return __float_as_uint(ptx::add_rm_f32(scaled, biased));
    if constexpr (code == Code::sym && bits > 1) return __float_as_uint(ptx::add_rn_f32(scaled, biased));
    const uint32_t rounded = __float_as_uint(ptx::add_rn_f32(scaled, magic));
    if constexpr (code == Code::asym) {
        const int32_t u = static_cast<int32_t>(rounded - magic_bits) + static_cast<int32_t>(s.zero);
        constexpr int32_t top = (1 << bits) - 1;
        return static_cast<uint32_t>(u > top ? top : u) + (offset - (1 << (bits - 1)));
    }
    const int32_t q = static_cast<int32_t>(rounded - magic_bits);  // one signed bit: -1 or 0
    return static_cast<uint32_t>(q > 0 ? 0 : q) + offset;
}

template <bool is_bf16> DEVICE void floats_of(uint4 values, float (&eight)[8]) {
    const uint32_t word[4] = {values.x, values.y, values.z, values.w};
    UNROLL for (int i = 0; i < 4; ++i) {
        eight[2 * i] = low_float<is_bf16>(word[i]);
        eight[2 * i + 1] = high_float<is_bf16>(word[i]);
    }
}

// Packs the low bytes of four words.
DEVICE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return ptx::prmt(ptx::prmt(a, b, 0x0040), ptx::prmt(c, d, 0x0040), 0x5410);
}

template <Code code, int bits, int offset, bool is_bf16> DEVICE uint32_t encode4(uint32_t x01, uint32_t x23, const Scale& s) {
    if constexpr (code == Code::e4m3) {
        const uint32_t low = ptx::cvt_e4m3x2_f32(ptx::mul_rn_f32(low_float<is_bf16>(x01), s.inverse),
                                                 ptx::mul_rn_f32(high_float<is_bf16>(x01), s.inverse));
        const uint32_t high = ptx::cvt_e4m3x2_f32(ptx::mul_rn_f32(low_float<is_bf16>(x23), s.inverse),
                                                  ptx::mul_rn_f32(high_float<is_bf16>(x23), s.inverse));
        return low | high << 16;
    } else {
        return low_bytes(encode<code, bits, offset>(low_float<is_bf16>(x01), s),
                         encode<code, bits, offset>(high_float<is_bf16>(x01), s),
                         encode<code, bits, offset>(low_float<is_bf16>(x23), s),
                         encode<code, bits, offset>(high_float<is_bf16>(x23), s));
    }
}

// Zeroes all but the first `count` of eight codes: the padding must be 0, not the code of the value 0.
template <bool aligned> DEVICE void keep(uint32_t& low, uint32_t& high, int count) {
    if constexpr (aligned) {
        if (count <= 0) low = high = 0;
    } else if (count < 8) {
        low &= planes::byte_mask(count);
        high &= planes::byte_mask(count - 4);
    }
}

// ---- Bit planes -----------------------------------------------------------------------------------------------------------

// Gathers bit `plane` of eight codes in nibbles (elements j and j + 4 in byte j) into the top byte, element e in bit e: a
// multiply whose partial products never share a bit, so that nothing carries into that byte.
DEVICE uint32_t plane_in_top_byte(uint32_t nibbles, int plane) { return (nibbles >> plane & 0x11111111u) * 0x01020408u; }
// The top bytes of four words, in order.
DEVICE uint32_t top_bytes(const uint32_t (&v)[4]) {
    return ptx::prmt(ptx::prmt(v[0], v[1], 0x0073), ptx::prmt(v[2], v[3], 0x0073), 0x5410);
}

// 4 x 4 byte transpose within a quad: lane p gets byte p of every lane.
DEVICE uint32_t transpose_quad(uint32_t v) {
    const uint32_t lane = ptx::lane_id();
    v = ptx::prmt(v, ptx::shfl_xor(v, 1), lane & 1 ? 0x3715 : 0x6240);
    return ptx::prmt(v, ptx::shfl_xor(v, 2), lane & 2 ? 0x3276 : 0x5410);
}

}  // namespace pack

// ---- The kernel -------------------------------------------------------------------------------------------------------------

// Config: threads, vectors (of 8 values, per thread), source, target, code, bits, is_bf16, aligned, shared_bytes; order and
// power (product K) of a Hadamard rotation of the source's output, with hadamard.cuh's results, or order 0 for none.
template <class Config> __global__ void __launch_bounds__(Config::threads) quantize(const __grid_constant__ Params p) {
    using namespace pack;
    constexpr int threads = Config::threads, warps = threads / 32, vectors = Config::vectors;
    constexpr bool bf16 = Config::is_bf16;
    constexpr Code code = Config::code;
    constexpr int bits = Config::bits;
    static_assert(threads % 128 == 0 && threads <= 1024, "the vectors of a block fill whole chunks of planes");
    const int row = blockIdx.x;
    const uint32_t thread = threadIdx.x;  // unsigned: divisions become shifts

    ptx::griddepcontrol_launch_dependents();
    constexpr int order = Config::order, power = Config::power, rotated_k = order * power;
    // Shared memory: reductions, then the rotated vector, then the signs.
    float* rotated = reinterpret_cast<float*>(ptx::dynamic_shared() + 4 * 128);
    if constexpr (order > 0) {
        static_assert(power % 8 == 0, "eight values lie in one part");
        static_assert(Config::shared_bytes == 4 * (128 + rotation::room(rotated_k) + rotation::signs_room(order)), "all three");
        rotation::spread_signs<threads, order>(rotated + rotation::room(rotated_k), p.signs);
    }
    // Loads keep program order, so the norm's are hoisted by hand: gamma, a weight, before griddepcontrol.wait, the residual
    // next to x. Rows of more vectors would run out of registers.
    constexpr bool normed = Config::source == Source::rms_norm, ahead = normed && vectors <= 4;
    [[maybe_unused]] uint4 gamma[ahead ? vectors : 1], other[ahead ? vectors : 1];
    if constexpr (ahead) {
        UNROLL for (int v = 0; v < vectors; ++v) gamma[v] = load8<Config::aligned>(p.gamma, 8 * (v * threads + thread), p.k);
    }
    ptx::griddepcontrol_wait();

    const uint16_t* x = p.x + row * p.x_stride;
    uint4 value[vectors];
    UNROLL for (int v = 0; v < vectors; ++v) value[v] = load8<Config::aligned>(x, 8 * (v * threads + thread), p.k);

    if constexpr (Config::source == Source::silu_mul) {
        UNROLL for (int v = 0; v < vectors; ++v) {
            const uint4 up = load8<Config::aligned>(x + p.k, 8 * (v * threads + thread), p.k);
            value[v] = each_pair(value[v], up, silu_mul_pair<bf16>);
        }
    }
    if constexpr (normed) {
        const uint16_t* residual = p.residual + row * p.residual_stride;
        if (ahead && p.residual) {
            UNROLL for (int v = 0; v < vectors; ++v) other[ahead ? v : 0] = load8<Config::aligned>(residual, 8 * (v * threads + thread), p.k);
        }
        float squares = 0.f;
        UNROLL for (int v = 0; v < vectors; ++v) {
            const int k = static_cast<int>(8 * (v * threads + thread));
            if (p.residual) {
                const uint4 add = ahead ? other[ahead ? v : 0] : load8<Config::aligned>(residual, k, p.k);
                value[v] = each_pair(value[v], add, add_pair<bf16>);
                store8<Config::aligned>(p.residual_sum + row * p.residual_stride, k, p.k, value[v]);
            }
            add_squares<bf16>(squares, value[v]);
        }
        const float factor = rsqrtf(over_block<Sum, warps, 0>(squares) / static_cast<float>(p.k) + p.epsilon);
        UNROLL for (int v = 0; v < vectors; ++v) {
            const uint4 by = ahead ? gamma[ahead ? v : 0] : load8<Config::aligned>(p.gamma, 8 * (v * threads + thread), p.k);
            value[v] = each_pair(value[v], by, [&](uint32_t x, uint32_t gain) { return normalize_pair<bf16>(x, gain, factor); });
        }
    }

    if constexpr (order > 0) {
        UNROLL for (int v = 0; v < vectors; ++v) {
            const int i = static_cast<int>(8 * (v * threads + thread));
            if (i >= rotated_k) continue;
            float eight[8];
            floats_of<bf16>(value[v], eight);
            rotation::butterflies(eight);
            uint4* to = reinterpret_cast<uint4*>(rotated + rotation::place(i));
            to[0] = make_uint4(__float_as_uint(eight[0]), __float_as_uint(eight[1]), __float_as_uint(eight[2]), __float_as_uint(eight[3]));
            to[1] = make_uint4(__float_as_uint(eight[4]), __float_as_uint(eight[5]), __float_as_uint(eight[6]), __float_as_uint(eight[7]));
        }
        __syncthreads();
        rotation::sylvester<threads, power, rotated_k, 8>(rotated);
        rotation::paley<threads, order, power>(rotated, rotated + rotation::room(rotated_k));
        UNROLL for (int v = 0; v < vectors; ++v) {
            const int i = static_cast<int>(8 * (v * threads + thread));
            if (i >= rotated_k) continue;
            const uint4* from = reinterpret_cast<const uint4*>(rotated + rotation::place(i));
            const uint4 a = from[0], b = from[1];
            value[v] = make_uint4(round_pair<bf16>(__uint_as_float(a.x) * p.factor, __uint_as_float(a.y) * p.factor),
                                  round_pair<bf16>(__uint_as_float(a.z) * p.factor, __uint_as_float(a.w) * p.factor),
                                  round_pair<bf16>(__uint_as_float(b.x) * p.factor, __uint_as_float(b.y) * p.factor),
                                  round_pair<bf16>(__uint_as_float(b.z) * p.factor, __uint_as_float(b.w) * p.factor));
        }
    }

    uint32_t high = 0, low = 0;  // packed pairs: largest magnitudes; asym: maxima and minima
    float magnitude = 0.f;
    UNROLL for (int v = 0; v < vectors; ++v) {
        const uint32_t word[4] = {value[v].x, value[v].y, value[v].z, value[v].w};
        UNROLL for (int i = 0; i < 4; ++i) {
            if constexpr (code == Code::asym) {
                high = max_pair<bf16>(high, word[i]);
                low = min_pair<bf16>(low, word[i]);
            } else {
                high = max_pair<bf16>(high, abs_pair<bf16>(word[i]));
            }
            if constexpr (code == Code::bipolar && bits == 1)
                magnitude += fabsf(low_float<bf16>(word[i])) + fabsf(high_float<bf16>(word[i]));
        }
    }
    // Both started from +0, so high is >= 0 and low <= 0: signs are known, and magnitudes suffice.
    const uint32_t most = over_block<Larger, warps, 1>(larger(high >> 16 & 0x7fffu, high & 0x7fffu));
    uint32_t least = 0;
    if constexpr (code == Code::asym) least = over_block<Larger, warps, 2>(larger(low >> 16 & 0x7fffu, low & 0x7fffu));
    float mean = 0.f;
    if constexpr (code == Code::bipolar && bits == 1) mean = over_block<Sum, warps, 2>(magnitude) / static_cast<float>(p.k);
    const Scale scale = find_scale<code, bits, bf16>(most, least, mean);

    uint32_t sum = 0;
    if constexpr (Config::target == Target::planes) {
        // One or two planes leave room in the 4 x 4 byte transpose for more vectors.
        constexpr int together = bits == 1 && vectors % 4 == 0 ? 4 : bits <= 2 && vectors % 2 == 0 ? 2 : 1;
        constexpr int first = bits < 4 ? bits : 4;
        // This lane writes plane `plane` (and 4 + plane) of the vectors `turn`, turn + together, ...
        const uint32_t lane = thread % 4, turn = together == 1 ? 0 : lane / bits, plane = lane - turn * bits;
        const uint32_t start = turn * threads + thread;
        const bool writes = plane < first && turn < together;
        // A chunk is 128 vectors: a thread's vectors have the same offset in different chunks.
        const int64_t plane_bytes = static_cast<int64_t>(p.padded_rows) * planes::row_bytes, chunk_bytes = bits * plane_bytes;
        uint8_t* base = p.codes + planes::piece_offset(start / 128, plane, bits, p.padded_rows, row, thread % 128 / 16) + thread / 4 % 4 * 4;
        uint32_t ones = 0, more_ones = 0;
        UNROLL for (int v = 0; v < vectors; v += together) {
            uint32_t top[4] = {0, 0, 0, 0}, more_top[4] = {0, 0, 0, 0};
            UNROLL for (int i = 0; i < together; ++i) {
                const int k = static_cast<int>(8 * ((v + i) * threads + thread));
                uint32_t codes_low = encode4<code, bits, 1 << (bits - 1), bf16>(value[v + i].x, value[v + i].y, scale);
                uint32_t codes_high = encode4<code, bits, 1 << (bits - 1), bf16>(value[v + i].z, value[v + i].w, scale);
                keep<Config::aligned>(codes_low, codes_high, p.k - k);
                const uint32_t nibbles = bits > 4 ? (codes_low & 0x0f0f0f0fu) | (codes_high & 0x0f0f0f0fu) << 4
                                                  : codes_low | codes_high << 4;
                UNROLL for (int j = 0; j < first; ++j) top[(i * first + j) % 4] = plane_in_top_byte(nibbles, j);
                if constexpr (bits > 4) {
                    const uint32_t upper = (codes_low >> 4 & 0x0f0f0f0fu) | (codes_high & 0xf0f0f0f0u);
                    UNROLL for (int j = 0; j < bits - 4; ++j) more_top[j] = plane_in_top_byte(upper, j);
                }
            }
            const bool inside = writes && static_cast<int>(8 * (v * threads + start)) < p.padded_k;
            uint8_t* to = base + v * (threads / 128) * chunk_bytes;
            const uint32_t word = transpose_quad(top_bytes(top));
            if (inside) {
                *reinterpret_cast<uint32_t*>(to) = word;
                ones += __popc(word);
            }
            if constexpr (bits > 4) {
                const uint32_t more = transpose_quad(top_bytes(more_top));
                if (inside && plane < bits - 4) {
                    *reinterpret_cast<uint32_t*>(to + 4 * plane_bytes) = more;
                    more_ones += __popc(more);
                }
            }
        }
        sum = (ones << plane) + (more_ones << (plane + 4));
    } else {
        int32_t codes_sum = 0;
        constexpr int offset = 0;  // signed bytes: code - 2^(bits-1)
        UNROLL for (int v = 0; v < vectors; ++v) {
            const int k = static_cast<int>(8 * (v * threads + thread));
            uint2 byte = make_uint2(encode4<code, bits, offset, bf16>(value[v].x, value[v].y, scale),
                                    encode4<code, bits, offset, bf16>(value[v].z, value[v].w, scale));
            keep<Config::aligned>(byte.x, byte.y, p.k - k);
            if constexpr (code != Code::e4m3)
                codes_sum = __dp4a(static_cast<int32_t>(byte.x), 0x01010101, __dp4a(static_cast<int32_t>(byte.y), 0x01010101, codes_sum));
            if (k < p.padded_k)
                *reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row) * p.padded_k + k) = byte;
        }
        sum = static_cast<uint32_t>(codes_sum);
    }
    if constexpr (code != Code::e4m3) sum = over_block<Sum, warps, 3>(sum);
    if (thread == 0) {
        p.scale[row] = scale.value();
        if constexpr (code != Code::e4m3) p.sum[row] = static_cast<int32_t>(sum);
        if constexpr (code == Code::asym)
            p.zero[row] = static_cast<int32_t>(scale.zero) - (Config::target == Target::bytes ? 1 << (bits - 1) : 0);
    }
}

#endif  // ANYBIT_QUANTIZE_ACTIVATIONS_CUH
