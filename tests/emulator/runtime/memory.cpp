// Device memory: one arena, a state per byte, and the last accesses to each byte of shared memory.
#include "runtime.h"

#include <algorithm>
#include <sys/mman.h>

namespace emulate {
namespace {

constexpr size_t ARENA = size_t{8} << 30, RED_ZONE = 64 << 10;  // reserved addresses; only touched pages cost memory
struct Buffer { uint8_t* start; size_t bytes; std::string name; };
// The last write to a byte, and one of the reads since.
struct Access { uint32_t written, read; uint16_t writer, reader; };

uint8_t *arena = nullptr, *states = nullptr;
size_t used = 0;
std::vector<Buffer> buffers;
std::map<const uint8_t*, std::vector<Access>> accesses;  // by start of a block's shared memory

bool inside(const void* p) { return arena && static_cast<size_t>(static_cast<const uint8_t*>(p) - arena) < used; }
uint8_t* state_of(const void* p) { return states + (static_cast<const uint8_t*>(p) - arena); }

const char* complaint(uint8_t state, bool write, Proxy proxy) {
    if (!(state & ADDRESSABLE)) return "overrun";
    if (state & IN_FLIGHT) return "an asynchronous copy is still writing there (a missing wait)";
    if (state & MBARRIER) return "an mbarrier is there";
    if ((state & DEPENDENT) && !current->block->waited_for_grid)
        return "an earlier kernel may still be using it: griddepcontrol_wait comes first";
    if (!write && proxy == Proxy::async && (state & UNFENCED))
        return "it was written by ordinary stores and no fence_proxy_async followed";
    return nullptr;
}

Block* owner_of_shared(const uint8_t* p) {
    for (Block& block : current->block->cluster->blocks)
        if (p >= block.shared && p < block.shared + launch.shared_bytes) return &block;
    return nullptr;
}

std::string thread_name(uint32_t clock_index) {
    const Block& block = current->block->cluster->blocks[clock_index / launch.threads];
    return text("thread %u of %s", clock_index % launch.threads, block.name.c_str());
}

void check_race(const uint8_t* p, size_t bytes, bool write, const char* what, Block& owner) {
    auto& shadow = accesses[owner.shared];
    if (shadow.size() < launch.shared_bytes) shadow.resize(launch.shared_bytes);
    const uint32_t me = current->clock_index, now = current->clock[me];
    Access* access = shadow.data() + (p - owner.shared);
    for (size_t i = 0; i < bytes; i++, access++) {
        const char* other = nullptr;
        uint32_t who = 0;
        if (access->written && access->writer != me && access->written > current->clock[access->writer])
            other = "written", who = access->writer;
        else if (write && access->read && access->reader != me && access->read > current->clock[access->reader])
            other = "read", who = access->reader;
        if (other)
            fail("race: %s %s %s, which %s has %s with no barrier between", what, write ? "writes" : "reads",
                 place(p + i).c_str(), thread_name(who).c_str(), other);
        if (write) {
            *access = Access{now, 0, static_cast<uint16_t>(me), 0};
        } else if (!access->read || access->reader == me || random_below(2)) {
            access->read = now;
            access->reader = static_cast<uint16_t>(me);
        }
    }
}

void check(const void* address, size_t bytes, bool write, const char* what, Proxy proxy, bool races) {
    auto* p = static_cast<uint8_t*>(const_cast<void*>(address));
    if (!inside(p)) fail("%s at %p of %zu bytes: this is no device memory", what, address, bytes);
    uint8_t* state = state_of(p);
    for (size_t i = 0; i < bytes; i++)
        if (state[i] != ADDRESSABLE)
            if (const char* wrong = complaint(state[i], write, proxy))
                fail("%s of %zu bytes %s %s: %s", what, bytes, write ? "to" : "from", place(p + i).c_str(), wrong);
    Block* owner = owner_of_shared(p);
    if (!owner) return;
    if (launch.races && races) check_race(p, bytes, write, what, *owner);
    if (write && proxy == Proxy::generic) {
        for (size_t i = 0; i < bytes; i++) state[i] |= UNFENCED;
        auto& list = owner->unfenced;
        if (!list.empty() && list.back().first + list.back().second == p)
            list.back().second += bytes;
        else
            list.emplace_back(p, bytes);
    }
}

}  // namespace

uint8_t* allocate(const char* name, size_t bytes, uint8_t extra_state) {
    if (!arena) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena = static_cast<uint8_t*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, flags, -1, 0));
        states = static_cast<uint8_t*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, flags, -1, 0));
        if (arena == MAP_FAILED || states == MAP_FAILED) abort();
    }
    if (used == 0) used = RED_ZONE;
    uint8_t* start = arena + used;
    memset(states + used, ADDRESSABLE | extra_state, bytes);
    used = (used + bytes + 2 * RED_ZONE - 1) / RED_ZONE * RED_ZONE;
    buffers.push_back({start, bytes, name});
    return start;
}

void free_everything() {
    if (arena) {
        madvise(arena, used, MADV_DONTNEED);
        madvise(states, used, MADV_DONTNEED);
    }
    used = 0;
    buffers.clear();
    accesses.clear();
}

void poison_shared(Block& block) {
    memset(block.shared, 0xff, launch.shared_bytes);  // NaN in every float format
    memset(state_of(block.shared), ADDRESSABLE, launch.shared_bytes);
    if (launch.races) accesses[block.shared].assign(launch.shared_bytes, Access{});
}

std::string place(const void* address) {
    const auto* p = static_cast<const uint8_t*>(address);
    const Buffer* best = nullptr;
    size_t distance = ~size_t{0};
    for (const Buffer& buffer : buffers) {
        const size_t away = p < buffer.start                  ? buffer.start - p
                            : p < buffer.start + buffer.bytes ? 0
                                                              : p - buffer.start - buffer.bytes + 1;
        if (away < distance) best = &buffer, distance = away;
    }
    if (!best) return text("%p", address);
    if (p < best->start) return text("%zu bytes before %s", static_cast<size_t>(best->start - p), best->name.c_str());
    const size_t offset = p - best->start;
    if (offset < best->bytes) return text("%s + %zu", best->name.c_str(), offset);
    return text("%s + %zu, past its %zu bytes", best->name.c_str(), offset, best->bytes);
}

void check_read(const void* p, size_t bytes, const char* what, Proxy proxy) {
    check(p, bytes, false, what, proxy, true);
}
void check_write(const void* p, size_t bytes, const char* what, Proxy proxy) {
    check(p, bytes, true, what, proxy, true);
}
void check_untimed(const void* p, size_t bytes, const char* what) {
    check(p, bytes, true, what, Proxy::generic, false);
}

void set_state(const void* p, size_t bytes, uint8_t bit, bool on) {
    uint8_t* state = state_of(p);
    for (size_t i = 0; i < bytes; i++) state[i] = on ? state[i] | bit : state[i] & ~bit;
}

uint8_t* resolve(uint32_t address, size_t bytes, const char* what) {
    const uint32_t rank = address >> 24, offset = (address & 0xffffff) - WINDOW;
    if (rank > launch.cluster) fail("%s: %#x is no address of shared memory", what, address);
    Block& block = rank ? current->block->cluster->blocks[rank - 1] : *current->block;
    if (!block.alive) fail("%s: %s has ended, and its shared memory with it", what, block.name.c_str());
    if (offset > launch.shared_bytes || offset + bytes > launch.shared_bytes)
        fail("%s of %zu bytes at shared memory + %d, of %u bytes: overrun", what, bytes, static_cast<int>(offset),
             launch.shared_bytes);
    return block.shared + offset;
}

uint8_t* resolve_local(uint32_t address, size_t bytes, const char* what) {
    if (address >> 24) fail("%s takes an address of this block, not one from mapa", what);
    return resolve(address, bytes, what);
}

}  // namespace emulate

using namespace emulate;

// ---- What -fsanitize=thread calls before every load and store of the kernel -----------------------------------------

static void checked(void* p, size_t bytes, bool write, bool aligned) {
    if (!inside(p)) return;
    const char* what = write ? "store" : "load";
    if (aligned && reinterpret_cast<uintptr_t>(p) % bytes)
        fail("%s of %zu bytes at %s: misaligned", what, bytes, place(p).c_str());
    write ? check_write(p, bytes, what) : check_read(p, bytes, what);
}

#define HOOKS(bytes)                                                                               \
    extern "C" void __tsan_read##bytes(void* p) { checked(p, bytes, false, true); }                \
    extern "C" void __tsan_write##bytes(void* p) { checked(p, bytes, true, true); }                \
    extern "C" void __tsan_unaligned_read##bytes(void* p) { checked(p, bytes, false, false); }     \
    extern "C" void __tsan_unaligned_write##bytes(void* p) { checked(p, bytes, true, false); }     \
    extern "C" void __tsan_volatile_read##bytes(void* p) { checked(p, bytes, false, true); }       \
    extern "C" void __tsan_volatile_write##bytes(void* p) { checked(p, bytes, true, true); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) { if (inside(p)) check_read(p, bytes, "load"); }
extern "C" void __tsan_write_range(void* p, size_t bytes) { if (inside(p)) check_write(p, bytes, "store"); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

extern "C" uint8_t* emulate_allocate(const char* name, size_t bytes, int dependent) {
    return allocate(name, bytes, dependent ? DEPENDENT : 0);
}
extern "C" void emulate_free() { free_everything(); }
