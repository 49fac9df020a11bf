// Warp-wide and block-wide operations: barriers, shuffles, matrix fragments and MMAs.
#include "device_calls.h"
#include "runtime.h"

#include <algorithm>
#include <cmath>

namespace emulate {
namespace {

uint32_t lanes_of(uint32_t warp) {
    const uint32_t rest = launch.threads - 32 * warp;
    return rest >= 32 ? 0xffffffffu : (1u << rest) - 1;
}

// All lanes of the mask meet; `finish` sees their arguments by lane.
void warp_meet(const char* name, uint32_t mask, void* argument, void (*finish)(void**), bool orders_memory) {
    const uint32_t warp = current->index / 32;
    if (!(mask >> current->lane & 1)) fail("%s: lane %u is not in the mask %#x it gives", name, current->lane, mask);
    mask &= lanes_of(warp);
    meet(current->warp->meetings[mask], name, 0, __builtin_popcount(mask), argument, finish, true, orders_memory);
}

struct ShuffleArgument { uint64_t value, result; uint32_t operand; Shuffle how; int width; };
void finish_shuffle(void** arguments) {
    auto** lanes = reinterpret_cast<ShuffleArgument**>(arguments);
    for (int lane = 0; lane < 32; lane++) {
        if (!lanes[lane]) continue;
        auto& a = *lanes[lane];
        const int first = lane / a.width * a.width, last = first + a.width - 1, by = static_cast<int>(a.operand);
        int from = lane;
        if (a.how == Shuffle::index) from = first + (by & (a.width - 1));
        if (a.how == Shuffle::exclusive_or && (lane ^ by) <= last) from = lane ^ by;
        if (a.how == Shuffle::up && lane - by >= first) from = lane - by;
        if (a.how == Shuffle::down && lane + by <= last) from = lane + by;
        a.result = lanes[from] ? lanes[from]->value : ~uint64_t{0};  // inactive lanes give poison
    }
}

struct VoteArgument { uint32_t value, result; };
void finish_ballot(void** arguments) {
    auto** lanes = reinterpret_cast<VoteArgument**>(arguments);
    uint32_t all = 0;
    for (int lane = 0; lane < 32; lane++) if (lanes[lane] && lanes[lane]->value) all |= 1u << lane;
    for (int lane = 0; lane < 32; lane++) if (lanes[lane]) lanes[lane]->result = all;
}
void finish_add(void** arguments) {
    auto** lanes = reinterpret_cast<VoteArgument**>(arguments);
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; lane++) if (lanes[lane]) sum += lanes[lane]->value;
    for (int lane = 0; lane < 32; lane++) if (lanes[lane]) lanes[lane]->result = sum;
}

// Matrix i of an 8 x 8 fragment in 16-bit elements: row r is 16 bytes; lane 4r + c / 2 holds elements 2c', 2c' + 1.
struct MatrixArgument { uint32_t* r; uint8_t* row; int count; bool trans; };
uint16_t* half(uint32_t* word, int i) { return reinterpret_cast<uint16_t*>(word) + i; }
template <bool store> void finish_matrices(void** arguments) {
    auto** lanes = reinterpret_cast<MatrixArgument**>(arguments);
    for (int i = 0; i < lanes[0]->count; i++)
        for (int row = 0; row < 8; row++)
            for (int column = 0; column < 8; column++) {
                const int r = lanes[0]->trans ? column : row, c = lanes[0]->trans ? row : column;
                uint16_t* element = half(&lanes[4 * r + c / 2]->r[i], c % 2);
                uint8_t* place = lanes[8 * i + row]->row + 2 * column;
                if (store) memcpy(place, element, 2); else memcpy(element, place, 2);
            }
}
struct WordArgument { uint32_t a, d; };
void finish_movmatrix(void** arguments) {
    auto** lanes = reinterpret_cast<WordArgument**>(arguments);
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) *half(&lanes[4 * c + r / 2]->d, r % 2) = *half(&lanes[4 * r + c / 2]->a, c % 2);
}

// ---- MMAs: rows of 32 bytes of k, for every type ---------------------------------------------------------------------

bool is_float(Kind kind) { return kind >= Kind::f16; }
int elements(Kind kind) {  // in 32 bytes
    switch (kind) {
        case Kind::b1: return 256;
        case Kind::s4: case Kind::u4: case Kind::e2m1: return 64;
        case Kind::f16: case Kind::bf16: return 16;
        default: return 32;
    }
}
float float_element(Kind kind, const uint8_t* row, int i) {
    uint16_t v;
    memcpy(&v, row + 2 * i, 2);
    if (kind == Kind::f16) return from_f16(v);
    if (kind == Kind::bf16) return from_bf16(v);
    return from_e4m3(row[i]);
}
int int_element(Kind kind, const uint8_t* row, int i) {
    if (kind == Kind::s8) return static_cast<int8_t>(row[i]);
    if (kind == Kind::u8) return row[i];
    const int nibble = row[i / 2] >> (i % 2 * 4) & 15;
    return kind == Kind::s4 && nibble >= 8 ? nibble - 16 : nibble;
}
struct Row { float f[64]; int n[64]; uint64_t bits[8]; };
Row decode(Kind kind, const uint8_t* bytes, int count) {
    Row row;
    if (kind == Kind::b1) memcpy(row.bits, bytes, 32);
    else if (is_float(kind)) for (int i = 0; i < count; i++) row.f[i] = float_element(kind, bytes, i);
    else for (int i = 0; i < count; i++) row.n[i] = int_element(kind, bytes, i);
    return row;
}
// d += a * b over one instruction's k; floats are summed in order, in fp32, which the hardware does not promise.
void accumulate_dot(Kind kind, uint32_t* d, const Row& a, const Row& b, int count) {
    if (is_float(kind)) {
        float sum;
        memcpy(&sum, d, 4);
        for (int i = 0; i < count; i++) sum += a.f[i] * b.f[i];
        memcpy(d, &sum, 4);
    } else if (kind == Kind::b1) {
        for (int i = 0; i < 4; i++) *d += __builtin_popcountll(a.bits[i] & b.bits[i]);
    } else {
        for (int i = 0; i < count; i++) *d += static_cast<uint32_t>(a.n[i] * b.n[i]);
    }
}

// Expand a row of a 2:4 sparse operand from its kept values and the metadata of the row's four lanes.
Row expand(Kind kind, const Row& compressed, const uint32_t (&metadata)[4], int selector, int r, const char* name) {
    const int kept = elements(kind);
    // As on hardware. 16-bit types: a pair of lanes of the quad, the halves of k, rows g and g + 8 in the low and
    // high half of each word. 8-bit types: lanes 0 and 2 hold row g, 1 and 3 row g + 8.
    const bool wide = kept == 16;
    Row a{};
    int last = -1;
    for (int i = 0; i < kept; i++) {
        const uint32_t word = metadata[wide ? 2 * selector + i / 8 : i / 16 * 2 + r / 8];
        const int place = word >> (wide ? r / 8 * 16 + i % 8 * 2 : i % 16 * 2) & 3, at = i / 2 * 4 + place;
        if (i % 2 && at <= last) fail("%s: metadata %#x has places that do not ascend", name, word);
        last = at;
        if (is_float(kind)) a.f[at] = compressed.f[i]; else a.n[at] = compressed.n[i];
    }
    return a;
}

struct MmaArgument {
    Kind a_kind, b_kind;
    uint32_t* d;
    const uint32_t *a, *b;
    uint32_t metadata;
    int selector;
    uint32_t a_scale, b_scale;
};
void gather_a(MmaArgument** lanes, uint8_t (*rows)[32]) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            memcpy(rows[lane / 4 + i % 2 * 8] + 4 * (lane % 4 + i / 2 * 4), &lanes[lane]->a[i], 4);
}
void finish_mma(void** arguments) {
    auto** lanes = reinterpret_cast<MmaArgument**>(arguments);
    const Kind a_kind = lanes[0]->a_kind, b_kind = lanes[0]->b_kind;
    const int count = elements(a_kind);
    uint8_t a_bytes[16][32], b_bytes[8][32];
    gather_a(lanes, a_bytes);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++) memcpy(b_bytes[lane / 4] + 4 * (lane % 4 + i * 4), &lanes[lane]->b[i], 4);
    for (int r = 0; r < 16; r++) {
        const Row a = decode(a_kind, a_bytes[r], count);
        for (int c = 0; c < 8; c++)
            accumulate_dot(a_kind, &lanes[4 * (r % 8) + c / 2]->d[c % 2 + r / 8 * 2], a,
                           decode(b_kind, b_bytes[c], count), count);
    }
}
void finish_mma_sp(void** arguments) {
    auto** lanes = reinterpret_cast<MmaArgument**>(arguments);
    const Kind a_kind = lanes[0]->a_kind, b_kind = lanes[0]->b_kind;
    const int kept = elements(a_kind);
    uint8_t a_bytes[16][32], b_bytes[8][64];
    gather_a(lanes, a_bytes);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) memcpy(b_bytes[lane / 4] + 4 * (lane % 4 + i * 4), &lanes[lane]->b[i], 4);
    for (int r = 0; r < 16; r++) {
        uint32_t words[4];
        for (int t = 0; t < 4; t++) words[t] = lanes[4 * (r % 8) + t]->metadata;
        const Row a = expand(a_kind, decode(a_kind, a_bytes[r], kept), words, lanes[0]->selector, r, "mma_sp");
        for (int c = 0; c < 8; c++)
            accumulate_dot(a_kind, &lanes[4 * (r % 8) + c / 2]->d[c % 2 + r / 8 * 2], a,
                           decode(b_kind, b_bytes[c], 2 * kept), 2 * kept);
    }
}
void finish_nvf4(void** arguments) {
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    auto** lanes = reinterpret_cast<MmaArgument**>(arguments);
    uint8_t a_bytes[16][32], b_bytes[8][32];
    gather_a(lanes, a_bytes);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++) memcpy(b_bytes[lane / 4] + 4 * (lane % 4 + i * 4), &lanes[lane]->b[i], 4);
    auto value = [](const uint8_t* row, int i) {
        const int nibble = row[i / 2] >> (i % 2 * 4) & 15;
        return nibble & 8 ? -values[nibble & 7] : values[nibble];
    };
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            float sum;
            uint32_t* d = &lanes[4 * (r % 8) + c / 2]->d[c % 2 + r / 8 * 2];
            memcpy(&sum, d, 4);
            for (int i = 0; i < 64; i++)
                sum += value(a_bytes[r], i) * value(b_bytes[c], i) *
                       from_e4m3(lanes[4 * (r % 8) + r / 8]->a_scale >> (i / 16 * 8) & 0x7f) *
                       from_e4m3(lanes[4 * c]->b_scale >> (i / 16 * 8) & 0x7f);
            memcpy(d, &sum, 4);
        }
}

// ---- wgmma: each warp computes its 16 rows ------------------------------------------------------------------------------

struct WgmmaArgument {
    const char* name;
    Kind a_kind, b_kind;
    int n;
    void* d;
    const uint32_t* a;
    uint64_t a_descriptor, b_descriptor;
    bool accumulate;
    bool sparse;
    uint32_t metadata;
    int selector;
};

// The 16-byte chunks of a row's 32 bytes of k, or 64 for sparse MMAs, at the descriptor's addresses.
struct RowChunks { const uint8_t* chunk[4]; };
RowChunks find_row(uint64_t descriptor, int row, int chunks, const char* what) {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const int mode = descriptor >> 62;
    if (descriptor >> 49 & 7)
        fail("%s: the descriptor's base offset is %d; tiles must be 1024-byte aligned", what,
             static_cast<int>(descriptor >> 49 & 7));
    static const uint32_t row_bytes[4] = {16, 128, 64, 32}, pattern[4] = {0, 0x70, 0x30, 0x10};
    RowChunks found;
    for (int chunk = 0; chunk < chunks; chunk++) {
        uint32_t address = start + row / 8 * stride + row % 8 * row_bytes[mode] + chunk * (mode ? 16 : leading);
        address ^= address >> 3 & pattern[mode];
        found.chunk[chunk] = resolve_local(address, 16, what);
        check_read(found.chunk[chunk], 16, what, Proxy::async);
    }
    return found;
}

void finish_wgmma(void** arguments) {
    auto** lanes = reinterpret_cast<WgmmaArgument**>(arguments);
    const WgmmaArgument& first = *lanes[0];
    Warp& warp = *current->warp;
    const int rank = current->index / 32 % 4, n = first.n, count = elements(first.a_kind);
    for (int lane = 1; lane < 32; lane++)
        if (lanes[lane]->a_descriptor != first.a_descriptor || lanes[lane]->b_descriptor != first.b_descriptor ||
            lanes[lane]->accumulate != first.accumulate)
            fail("%s: lane %d gives other descriptors or another `accumulate` than lane 0", first.name, lane);
    if (!warp.fenced)
        fail("%s: registers were touched since the last wgmma_wait_group, and no wgmma_fence followed", first.name);

    Product* product = nullptr;
    for (Product& other : warp.products) if (other.registers[0] == first.d) product = &other;
    if (product && product->count != n / 2) fail("%s: the accumulators are in flight with another shape", first.name);
    if (!product) {
        warp.products.push_back({});
        product = &warp.products.back();
        product->count = n / 2;
        product->values.resize(32 * (n / 2));
        for (int lane = 0; lane < 32; lane++) {
            product->registers.push_back(lanes[lane]->d);
            memcpy(&product->values[lane * (n / 2)], lanes[lane]->d, 4 * (n / 2));
        }
    }
    if (!first.accumulate) std::fill(product->values.begin(), product->values.end(), 0);

    Operand seen{++warp.instructions, {}, {}, first.name};
    auto read = [&](uint64_t descriptor, int row, int chunks, uint8_t* bytes) {
        const RowChunks found = find_row(descriptor, row, chunks, first.name);
        for (int chunk = 0; chunk < chunks; chunk++) {
            memcpy(bytes + 16 * chunk, found.chunk[chunk], 16);
            seen.rows.push_back(found.chunk[chunk]);
            seen.seen.insert(seen.seen.end(), found.chunk[chunk], found.chunk[chunk] + 16);
        }
    };
    uint8_t bytes[64];
    Row a[16];
    const int wide = first.sparse ? 2 : 1;
    for (int r = 0; r < 16; r++) {
        if (first.a) {
            for (int word = 0; word < 8; word++)
                memcpy(bytes + 4 * word, &lanes[r % 8 * 4 + word % 4]->a[r / 8 + word / 4 * 2], 4);
        } else {
            read(first.a_descriptor, 16 * rank + r, 2, bytes);
        }
        a[r] = decode(first.a_kind, bytes, count);
        if (!first.sparse) continue;
        uint32_t words[4];
        for (int t = 0; t < 4; t++) words[t] = lanes[r % 8 * 4 + t]->metadata;
        a[r] = expand(first.a_kind, a[r], words, first.selector, r, first.name);
    }
    for (int column = 0; column < n; column++) {
        read(first.b_descriptor, column, 2 * wide, bytes);
        const Row b = decode(first.b_kind, bytes, wide * count);
        for (int r = 0; r < 16; r++) {
            const int lane = r % 8 * 4 + column % 8 / 2, element = column / 8 * 4 + r / 8 * 2 + column % 2;
            accumulate_dot(first.a_kind, &product->values[lane * (n / 2) + element], a[r], b, wide * count);
        }
    }
    warp.operands.push_back(std::move(seen));
    product->last = warp.instructions;
    for (int lane = 0; lane < 32; lane++) memset(lanes[lane]->d, 0xff, 4 * (n / 2));
}

void finish_commit(void**) { current->warp->groups.push_back(current->warp->instructions); }

void finish_wait(void** arguments) {
    Warp& warp = *current->warp;
    const uint32_t keep = *static_cast<uint32_t*>(arguments[0]);
    uint64_t complete = 0;
    while (warp.groups.size() > keep) {
        complete = warp.groups.front();
        warp.groups.pop_front();
    }
    for (Operand& operand : warp.operands)
        if (operand.instruction <= complete)
            for (size_t i = 0; i < operand.rows.size(); i++)
                if (memcmp(operand.rows[i], &operand.seen[16 * i], 16) != 0)
                    fail("%s: its operand at %s was overwritten before the product was waited for",
                         operand.name.c_str(), place(operand.rows[i]).c_str());
    auto done = [&](const Operand& operand) { return operand.instruction <= complete; };
    warp.operands.erase(std::remove_if(warp.operands.begin(), warp.operands.end(), done), warp.operands.end());
    for (size_t i = 0; i < warp.products.size();) {
        Product& product = warp.products[i];
        if (product.last > complete) {
            i++;
            continue;
        }
        for (int lane = 0; lane < 32; lane++)
            memcpy(product.registers[lane], &product.values[lane * product.count], 4 * product.count);
        warp.products.erase(warp.products.begin() + i);
        warp.fenced = false;
    }
}
void finish_fence(void**) { current->warp->fenced = true; }

}  // namespace

uint64_t shuffle(uint64_t value, uint32_t operand, Shuffle how, uint32_t mask, int width) {
    static const char* const names[] = {"shfl", "shfl_xor", "shfl_up", "shfl_down"};
    ShuffleArgument argument{value, 0, operand, how, width};
    warp_meet(names[static_cast<int>(how)], mask, &argument, finish_shuffle, false);
    return argument.result;
}
uint32_t ballot(bool predicate, uint32_t mask, const char* name) {
    VoteArgument argument{predicate, 0};
    warp_meet(name, mask, &argument, finish_ballot, false);
    return argument.result;
}
uint32_t reduce_add(uint32_t value, uint32_t mask) {
    VoteArgument argument{value, 0};
    warp_meet("redux_add", mask, &argument, finish_add, false);
    return argument.result;
}
void syncwarp(uint32_t mask) { warp_meet("__syncwarp", mask, nullptr, nullptr, true); }
void barrier(int id, uint32_t threads, bool waits, int line) {
    static const char* const names[16] = {
        "__syncthreads",    "named barrier 1",  "named barrier 2",  "named barrier 3",
        "named barrier 4",  "named barrier 5",  "named barrier 6",  "named barrier 7",
        "named barrier 8",  "named barrier 9",  "named barrier 10", "named barrier 11",
        "named barrier 12", "named barrier 13", "named barrier 14", "named barrier 15"};
    if (id < 0 || id > 15) fail("bar.sync %d: barriers are numbered 0 to 15", id);
    if (id && (threads % 32 || threads == 0 || threads > launch.threads))
        fail("bar.sync %d, %u: the count must be a multiple of 32, at most the block's %u threads", id, threads,
             launch.threads);
    meet(current->block->barriers[id], names[id], line, id ? threads : launch.threads, nullptr, nullptr, waits, true);
}
void ldmatrix(uint32_t* r, uint32_t address, int count, bool trans) {
    MatrixArgument argument{r, nullptr, count, trans};
    if (current->lane < 8u * count) {
        if (address % 16) fail("ldmatrix: address %#x is not a multiple of 16", address);
        argument.row = resolve_local(address, 16, "ldmatrix");
        check_read(argument.row, 16, "ldmatrix");
    }
    warp_meet(trans ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, &argument, finish_matrices<false>, true);
}
void stmatrix(uint32_t address, const uint32_t* r, int count, bool trans) {
    MatrixArgument argument{const_cast<uint32_t*>(r), nullptr, count, trans};
    if (address % 16) fail("stmatrix: address %#x is not a multiple of 16", address);
    argument.row = resolve_local(address, 16, "stmatrix");
    check_write(argument.row, 16, "stmatrix");
    warp_meet(trans ? "stmatrix.trans" : "stmatrix", 0xffffffffu, &argument, finish_matrices<true>, true);
}
uint32_t movmatrix_trans(uint32_t a) {
    WordArgument argument{a, 0};
    warp_meet("movmatrix", 0xffffffffu, &argument, finish_movmatrix, false);
    return argument.d;
}
void mma(const char* name, Kind a_kind, Kind b_kind, void* d, const uint32_t* a, const uint32_t* b) {
    MmaArgument argument{a_kind, b_kind, static_cast<uint32_t*>(d), a, b, 0, 0, 0, 0};
    warp_meet(name, 0xffffffffu, &argument, finish_mma, false);
}
void mma_sp(const char* name, Kind a_kind, Kind b_kind, void* d, const uint32_t* a, const uint32_t* b,
            uint32_t metadata, int selector) {
    MmaArgument argument{a_kind, b_kind, static_cast<uint32_t*>(d), a, b, metadata, selector, 0, 0};
    warp_meet(name, 0xffffffffu, &argument, finish_mma_sp, false);
}
void mma_nvf4(float* d, const uint32_t* a, const uint32_t* b, uint32_t a_scale, uint32_t b_scale) {
    MmaArgument argument{Kind::e2m1, Kind::e2m1, reinterpret_cast<uint32_t*>(d), a, b, 0, 0, a_scale, b_scale};
    warp_meet("mma_m16n8k64_nvf4", 0xffffffffu, &argument, finish_nvf4, false);
}
void wgmma(const char* name, Kind a_kind, Kind b_kind, int n, void* d, const uint32_t* a, uint64_t a_descriptor,
           uint64_t b_descriptor, bool accumulate) {
    WgmmaArgument argument{name, a_kind, b_kind, n, d, a, a_descriptor, b_descriptor, accumulate, false, 0, 0};
    warp_meet(name, 0xffffffffu, &argument, finish_wgmma, true);
}
void wgmma_sp(const char* name, Kind a_kind, Kind b_kind, int n, void* d, const uint32_t* a, uint32_t metadata,
              int selector, uint64_t b_descriptor, bool accumulate) {
    WgmmaArgument argument{name, a_kind, b_kind, n, d, a, 0, b_descriptor, accumulate, true, metadata, selector};
    warp_meet(name, 0xffffffffu, &argument, finish_wgmma, true);
}
void wgmma_fence() { warp_meet("wgmma_fence", 0xffffffffu, nullptr, finish_fence, true); }
void wgmma_commit_group() { warp_meet("wgmma_commit_group", 0xffffffffu, nullptr, finish_commit, true); }
void wgmma_wait_group(uint32_t keep) { warp_meet("wgmma_wait_group", 0xffffffffu, &keep, finish_wait, true); }
uint32_t cluster_rank() { return current->block->rank; }
uint32_t cluster_size() { return launch.cluster; }
void trap() { fail("__trap"); }

}  // namespace emulate
