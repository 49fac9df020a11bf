// Layout of a packed KV block, and unpacking of a lane's words into MMA A fragments. Twin: kv_page.py.
#ifndef ANYBIT_KV_PAGE_CUH
#define ANYBIT_KV_PAGE_CUH

#include "common/ptx/base.cuh"

namespace kv_page {

// Sizes and offsets of a block's parts. Twin: kv_page.PageLayout.
template <class Config> struct Format {
    static constexpr int depth = Config::head_dim / 16;                              // channel tiles
    static constexpr int groups = Config::head_dim / Config::channel_group;          // channel groups per token
    static constexpr int value_groups = Config::value_bits == 16 ? 1 : groups;
    static constexpr int key_codes = Config::block * Config::head_dim * Config::key_bits / 8;
    static constexpr int key_parameters =
        Config::key_bits == 16 ? 0
        : Config::fp4 ? Config::block * Config::head_dim / 16
        : 4 * (Config::by_channel ? Config::head_dim * (Config::block / Config::chunk) : Config::block * groups);
    static constexpr int key_bytes = key_codes + key_parameters;
    static constexpr int value_codes = Config::block * Config::head_dim * Config::value_bits / 8;
    static constexpr int value_parameters = Config::value_bits == 16 ? 0
                                          : Config::fp4 ? Config::block * Config::head_dim / 16
                                          : 4 * Config::block * groups;
    static constexpr int value_bytes = value_codes + value_parameters + (Config::value_bits == 16 || Config::fp4 ? 0 : 32);
    static constexpr int block_bytes = (key_bytes + value_bytes + 127) / 128 * 128;
};

// Error codes of checked kernels. Twin: kv_page.WRONG.
constexpr uint32_t bad_length = 1, bad_page = 2, bad_sequence = 3;

// The smallest whole bundle of a lane's words: `words` of them unpack to `tiles` row tiles of A.
template <int bits> struct Bundle {
    static constexpr int words = bits <= 4 ? 1 : bits / 4;
    static constexpr int tiles = bits == 2 ? 2 : 1;
};

// Codes are used as float16 subnormals, worth exactly code * 2^-24, times a power of two for codes masked in place rather
// than shifted down. unscale undoes both, for rows g (half 0) or g + 8 (half 1).
template <int bits> DEVICE constexpr float unscale(int tile, int half) {
    return bits == 16 ? 1.0f
         : bits == 8  ? 16777216.0f
         : bits == 4  ? (half ? 1048576.0f : 16777216.0f)
                      : (tile & 1 ? (half ? 262144.0f : 1048576.0f) : (half ? 4194304.0f : 16777216.0f));
}

// The A fragment of row tile `tile` (within the bundle) from the bundle's words.
template <int bits> DEVICE void fragment(uint32_t (&a)[4], const uint32_t* w, int tile) {
    if constexpr (bits == 16) {
        a[0] = w[0]; a[1] = w[1]; a[2] = w[2]; a[3] = w[3];
    } else if constexpr (bits == 8) {
        a[0] = w[0] & 0x00ff00ffu; a[1] = (w[0] >> 8) & 0x00ff00ffu;
        a[2] = w[1] & 0x00ff00ffu; a[3] = (w[1] >> 8) & 0x00ff00ffu;
    } else {
        const uint32_t v = w[0] >> 8;
        const uint32_t low = bits == 4 ? 0x000f000fu : tile ? 0x00300030u : 0x00030003u;
        const uint32_t high = bits == 4 ? 0x00f000f0u : tile ? 0x00c000c0u : 0x000c000cu;
        a[0] = w[0] & low; a[1] = w[0] & high; a[2] = v & low; a[3] = v & high;
    }
}

// The u8 A fragment of mma.m16n8k32 for row tile `tile`, from the words of two adjacent depth tiles. Codes are masked in
// place within their bytes, which scales rows by powers of two.
template <int bits, int words> DEVICE void byte_fragment(uint32_t (&a)[4], const uint32_t (&even)[words], const uint32_t (&odd)[words], int tile) {
    const uint32_t v = even[tile / Bundle<bits>::tiles], w = odd[tile / Bundle<bits>::tiles];
    const uint32_t low = bits == 4 ? 0x0f0f0f0fu : tile & 1 ? 0x30303030u : 0x03030303u;
    const uint32_t high = bits == 4 ? 0xf0f0f0f0u : tile & 1 ? 0xc0c0c0c0u : 0x0c0c0c0cu;
    a[0] = v & low; a[1] = v & high; a[2] = w & low; a[3] = w & high;
}

// Streams a lane's words with 16-byte loads; indices are compile-time constants once the loops are unrolled.
struct Words {
    uint32_t base;  // shared address of the codes plus 16 * lane
    uint32_t v[4];
    DEVICE const uint32_t* at(int index) {
        if (index % 4 == 0) {
            const uint4 x = ptx::ld_shared_v4(base + index / 4 * 512);
            v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
        }
        return v + index % 4;
    }
};

DEVICE float low_f16(uint32_t w) { return ptx::cvt_f32_f16(static_cast<uint16_t>(w)); }
DEVICE float high_f16(uint32_t w) { return ptx::cvt_f32_f16(static_cast<uint16_t>(w >> 16)); }
DEVICE uint32_t both_low(uint32_t a, uint32_t b) { return ptx::prmt(a, b, 0x5410u); }
DEVICE uint32_t twice_low(uint32_t w) { return ptx::prmt(w, w, 0x1010u); }

}  // namespace kv_page

#endif  // ANYBIT_KV_PAGE_CUH
