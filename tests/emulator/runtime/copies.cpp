// Asynchronous copies, mbarriers, clusters and memory that other blocks share.
#include "device_calls.h"
#include "runtime.h"

#include <algorithm>

namespace emulate {

namespace {

std::string barrier_text(const char* what, uint32_t address, const Barrier& barrier, uint32_t parity) {
    return text("%s of the mbarrier at shared memory + %u, parity %u (phase %u lacks %u of %u arrivals and %lld bytes)",
                what, (address & 0xffffff) - WINDOW, parity, barrier.phase, barrier.pending, barrier.arrivals,
                static_cast<long long>(barrier.bytes));
}

Block& block_of(uint32_t address) {
    const uint32_t rank = address >> 24;
    return rank ? current->block->cluster->blocks[rank - 1] : *current->block;
}

Barrier& barrier_at(uint32_t address, const char* what) {
    resolve(address, 8, what);
    if (address % 8) fail("%s: the mbarrier's address %#x is not a multiple of 8", what, address);
    Block& block = block_of(address);
    auto found = block.mbarriers.find(address & 0xffffff);
    if (found == block.mbarriers.end())
        fail("%s: no mbarrier was initialized at shared memory + %u", what, (address & 0xffffff) - WINDOW);
    return found->second;
}

// Wake them: the phase is complete, or something can land now.
void wake_waiting(Barrier& barrier) {
    for (Thread* thread : barrier.waiting) wake(thread);
    barrier.waiting.clear();
}

void complete_if_due(Barrier& barrier, uint32_t address) {
    if (barrier.pending) return;
    if (barrier.bytes < 0)
        fail("the mbarrier at shared memory + %u got %lld bytes more than were expected", (address & 0xffffff) - WINDOW,
             static_cast<long long>(-barrier.bytes));
    if (barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
    if (launch.races) entry(barrier.clock, barrier.clock_index) = barrier.phase;
    barrier.completed = barrier.clock;
    wake_waiting(barrier);
}

void arrive(Barrier& barrier, uint32_t address, Thread* thread, const char* what) {
    if (!barrier.pending)
        fail("%s: the mbarrier at shared memory + %u has all its %u arrivals and still waits for %lld bytes", what,
             (address & 0xffffff) - WINDOW, barrier.arrivals, static_cast<long long>(barrier.bytes));
    if (launch.races) join(barrier.clock, thread->clock);
    tick(thread);
    barrier.pending--;
    complete_if_due(barrier, address);
    progress();
}

void issue(Copy& copy, const char* what) {
    check_write(copy.to, copy.bytes, what, Proxy::async);
    if (copy.valid && copy.value.empty()) check_read(copy.from, copy.valid, what, Proxy::async);
    if (launch.races) copy.clock = copy.issuer->clock;
    tick(copy.issuer);
    memset(copy.to, 0xff, copy.bytes);
    set_state(copy.to, copy.bytes, IN_FLIGHT, true);
}

void land(Copy& copy) {
    set_state(copy.to, copy.bytes, IN_FLIGHT, false);
    if (copy.valid) memcpy(copy.to, copy.value.empty() ? copy.from : copy.value.data(), copy.valid);
    memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
    progress();
}

void land_own(Thread& thread, size_t keep) {
    while (thread.groups.size() > keep) {
        for (Copy& copy : thread.groups.front()) land(copy);
        thread.groups.pop_front();
    }
}

void source_still_there(Copy& copy) {
    if (copy.from && memcmp(copy.from, copy.value.data(), copy.bytes) != 0)
        fail("cp.async.bulk store: %s was written again before the store had read it (a missing wait_group_read)",
             place(copy.from).c_str());
    copy.from = nullptr;
}

// Complete one asynchronous operation of the barrier, in any order; false if there is none.
bool advance(Barrier& barrier, uint32_t address) {
    if (!barrier.copies.empty()) {
        const uint32_t chosen = random_below(barrier.copies.size());
        Copy copy = barrier.copies[chosen];
        barrier.copies.erase(barrier.copies.begin() + chosen);
        land(copy);
        if (launch.races) join(barrier.clock, copy.clock);
        barrier.bytes -= copy.bytes;
        complete_if_due(barrier, address);
        return true;
    }
    if (!barrier.noinc.empty()) {
        Thread* thread = barrier.noinc.back();
        barrier.noinc.pop_back();
        land_own(*thread, 0);
        for (Copy& copy : thread->copies) land(copy);
        thread->copies.clear();
        arrive(barrier, address, thread, "cp.async.mbarrier.arrive.noinc");
        return true;
    }
    return false;
}

// A wait that returned is right in every order of threads if all phases before the one that it saw were known to be
// complete: were the one before still on its way, the same wait would have returned at once.
void check_unambiguous(const Barrier& barrier, uint32_t address, uint32_t parity, const char* what) {
    const uint32_t at = (address & 0xffffff) - WINDOW;
    if (barrier.phase == 0) {  // a fresh barrier's parity 1: whoever fills may, nobody who means data on their way
        if (barrier.bytes || !barrier.copies.empty())
            fail("%s: skipped wait: the mbarrier at shared memory + %u, parity %u, is not complete once, and its first "
                 "bytes are on their way",
                 what, at, parity);
        return;
    }
    const uint32_t known = entry(current->clock, barrier.clock_index);
    if (known + 1 < barrier.phase)
        fail("%s: skipped wait: the mbarrier at shared memory + %u, parity %u, is complete %u times, and this thread has "
             "seen %u: while the last but one was on its way it would have returned as well",
             what, at, parity, barrier.phase, known);
}

bool is_complete(Barrier& barrier, uint32_t address, uint32_t parity, const char* what) {
    if ((barrier.phase & 1) == (parity & 1)) return false;
    if (launch.races) {
        check_unambiguous(barrier, address, parity, what);
        join(current->clock, barrier.completed);
    }
    tick(current);
    return true;
}

void check_bulk(uint32_t shared, const void* global, uint32_t bytes, const char* what) {
    if (shared % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16 || bytes == 0)
        fail("%s: shared address %#x, global address %p and size %u must be multiples of 16", what, shared, global,
             bytes);
}

void signalled(Copy copy, uint32_t barrier_address, const char* what) {
    Barrier& barrier = barrier_at(barrier_address, what);
    issue(copy, what);
    barrier.copies.push_back(std::move(copy));
    wake_waiting(barrier);
}

}  // namespace

void finish_thread(Thread& thread) {
    land_own(thread, 0);
    for (Copy& copy : thread.copies) land(copy);
    if (!thread.stores.empty()) fail("the thread ended with a bulk store that it has not committed");
    for (auto& group : thread.store_groups)
        for (Copy& copy : group) {
            if (copy.from)
                fail("the thread ended while its bulk store still reads %s: wait with cp_async_bulk_wait_group_read",
                     place(copy.from).c_str());
            land(copy);
        }
    for (Product& product : thread.warp->products)
        if (product.registers[thread.lane])
            fail("the thread ended with a wgmma in flight: wgmma_wait_group<0> is missing");
}

void finish_block(Block& block) {
    for (auto& [address, barrier] : block.mbarriers)
        if (!barrier.copies.empty())
            fail("%s ended while a bulk copy to %s, which signals the mbarrier at shared memory + %u, was in flight",
                 block.name.c_str(), place(barrier.copies[0].to).c_str(), address - WINDOW);
}

// ---- cp.async --------------------------------------------------------------------------------------------------------

void cp_async(uint32_t shared, const void* global, uint32_t bytes, uint32_t valid) {
    uint8_t* to = resolve_local(shared, bytes, "cp.async");
    if (valid > bytes) fail("cp.async: %u valid bytes of %u", valid, bytes);
    if (shared % bytes || (valid && reinterpret_cast<uintptr_t>(global) % bytes))
        fail("cp.async: shared address %#x and global address %p must be multiples of %u", shared, global, bytes);
    Copy copy{to, static_cast<const uint8_t*>(global), bytes, valid, {}, current, nullptr, {}};
    issue(copy, "cp.async");
    current->copies.push_back(std::move(copy));
}
void cp_async_commit_group() {
    current->groups.push_back(std::move(current->copies));
    current->copies.clear();
}
void cp_async_wait_group(uint32_t keep) { land_own(*current, keep); }
void cp_async_wait_all() {
    land_own(*current, 0);
    for (Copy& copy : current->copies) land(copy);
    current->copies.clear();
}
void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    Barrier& target = barrier_at(barrier, "cp.async.mbarrier.arrive.noinc");
    target.noinc.push_back(current);
    wake_waiting(target);
}

// ---- mbarrier --------------------------------------------------------------------------------------------------------

void mbarrier_init(uint32_t address, uint32_t arrivals) {
    uint8_t* p = resolve_local(address, 8, "mbarrier.init");
    if (address % 8) fail("mbarrier.init: address %#x is not a multiple of 8", address);
    if (!arrivals) fail("mbarrier.init at shared memory + %u: at least one arrival must be expected", address - WINDOW);
    Barrier barrier{};
    barrier.arrivals = barrier.pending = arrivals;
    barrier.clock_index = launch.threads * launch.cluster + current->block->cluster->mbarriers++;
    current->block->mbarriers[address] = barrier;
    set_state(p, 8, MBARRIER, true);
}
void mbarrier_arrive(uint32_t address, const char* what) { arrive(barrier_at(address, what), address, current, what); }
void mbarrier_expect_tx(uint32_t address, uint32_t bytes) { barrier_at(address, "mbarrier.expect_tx").bytes += bytes; }
bool mbarrier_test_wait(uint32_t address, uint32_t parity) {
    Barrier& barrier = barrier_at(address, "mbarrier.test_wait");
    if ((barrier.phase & 1) == (parity & 1)) advance(barrier, address);
    if (is_complete(barrier, address, parity, "mbarrier.test_wait")) return true;
    yield("mbarrier.test_wait");
    return false;
}
void mbarrier_wait(uint32_t address, uint32_t parity) {
    resolve_local(address, 8, "mbarrier.try_wait");
    Barrier& barrier = barrier_at(address, "mbarrier.try_wait");
    while ((barrier.phase & 1) == (parity & 1)) {
        if (advance(barrier, address)) continue;
        barrier.waiting.push_back(current);
        block_on([=, &barrier] { return barrier_text("try_wait", address, barrier, parity); });
    }
    is_complete(barrier, address, parity, "mbarrier.try_wait");
}
void fence_proxy_async() {
    for (auto& [p, bytes] : current->block->unfenced) set_state(p, bytes, UNFENCED, false);
    current->block->unfenced.clear();
}

// ---- Bulk copies -----------------------------------------------------------------------------------------------------

void cp_async_bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    check_bulk(shared, global, bytes, "cp.async.bulk load");
    uint8_t* to = resolve(shared, bytes, "cp.async.bulk load");
    signalled({to, static_cast<const uint8_t*>(global), bytes, bytes, {}, current, nullptr, {}}, barrier,
              "cp.async.bulk load");
}
void cp_async_bulk_load_multicast(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                  uint16_t blocks) {
    resolve_local(shared, bytes, "cp.async.bulk multicast load");
    if (blocks >> launch.cluster)
        fail("cp.async.bulk multicast load: block mask %#x, but the cluster has %u blocks", blocks, launch.cluster);
    for (uint32_t rank = 0; rank < launch.cluster; rank++)
        if (blocks >> rank & 1) cp_async_bulk_load(mapa(shared, rank), global, bytes, mapa(barrier, rank));
}
struct Map {  // tests/emulator/emulate.py packs it
    uint64_t base;
    uint32_t rows, row_bytes, pitch, box_rows, element_bytes;
};
// A box of 128-byte rows, 16-byte chunks swizzled by the row (by the address, as the hardware does); zeros outside.
void cp_async_bulk_tensor_2d(uint32_t shared, const void* map, int x, int y, uint32_t barrier) {
    Map box;
    memcpy(&box, map, sizeof box);
    if (shared % 1024 % 128) fail("cp.async.bulk.tensor: shared address %#x must be a multiple of 128", shared);
    const int64_t first = static_cast<int64_t>(x) * box.element_bytes;
    for (uint32_t r = 0; r < box.box_rows; r++)
        for (uint32_t chunk = 0; chunk < 8; chunk++) {
            const uint32_t plain = shared + r * 128 + chunk * 16, target = plain ^ (plain >> 7 & 7) << 4;
            const int64_t row = static_cast<int64_t>(y) + r, at = first + chunk * 16;
            int64_t valid = row >= 0 && row < box.rows && at >= 0 ? static_cast<int64_t>(box.row_bytes) - at : 0;
            valid = std::clamp<int64_t>(valid, 0, 16);
            const auto* from = reinterpret_cast<const uint8_t*>(box.base) + row * box.pitch + at;
            uint8_t* to = resolve(target, 16, "cp.async.bulk.tensor");
            signalled({to, from, 16, static_cast<uint32_t>(valid), {}, current, nullptr, {}}, barrier,
                      "cp.async.bulk.tensor");
        }
}
void cp_async_bulk_tensor_2d_multicast(uint32_t shared, const void* map, int x, int y, uint32_t barrier,
                                       uint16_t blocks) {
    if (blocks >> launch.cluster)
        fail("cp.async.bulk.tensor multicast: block mask %#x, but the cluster has %u blocks", blocks, launch.cluster);
    for (uint32_t rank = 0; rank < launch.cluster; rank++)
        if (blocks >> rank & 1) cp_async_bulk_tensor_2d(mapa(shared, rank), map, x, y, mapa(barrier, rank));
}
static void store(uint8_t* global, uint32_t shared, uint32_t bytes, const char* what) {
    const uint8_t* from = resolve_local(shared, bytes, what);
    check_read(from, bytes, what, Proxy::async);
    Copy copy{global, from, bytes, bytes, std::vector<uint8_t>(from, from + bytes), current, nullptr, {}};
    issue(copy, what);
    current->stores.push_back(std::move(copy));
}
void cp_async_bulk_store(void* global, uint32_t shared, uint32_t bytes) {
    check_bulk(shared, global, bytes, "cp.async.bulk store");
    store(static_cast<uint8_t*>(global), shared, bytes, "cp.async.bulk store");
}
// The reverse: elements outside the matrix are skipped.
void cp_async_bulk_tensor_store_2d(const void* map, int x, int y, uint32_t shared) {
    const char* what = "cp.async.bulk.tensor store";
    Map box;
    memcpy(&box, map, sizeof box);
    if (shared % 128) fail("%s: shared address %#x must be a multiple of 128", what, shared);
    if (box.base % 16 || box.pitch % 16) fail("%s: the matrix's rows do not start on 16 bytes", what);
    if (box.row_bytes % 16) fail("%s: rows of %u bytes, but the hardware stores whole sixteens", what, box.row_bytes);
    const int64_t first = static_cast<int64_t>(x) * box.element_bytes;
    for (uint32_t r = 0; r < box.box_rows; r++)
        for (uint32_t chunk = 0; chunk < 8; chunk++) {
            const uint32_t plain = shared + r * 128 + chunk * 16, source = plain ^ (plain >> 7 & 7) << 4;
            const int64_t row = static_cast<int64_t>(y) + r, at = first + chunk * 16;
            if (row < 0 || row >= box.rows || at < 0 || at >= box.row_bytes) continue;
            store(reinterpret_cast<uint8_t*>(box.base) + row * box.pitch + at, source, 16, what);
        }
}
void cp_async_bulk_commit_group() {
    current->store_groups.push_back(std::move(current->stores));
    current->stores.clear();
}
void cp_async_bulk_wait_group(uint32_t keep, bool only_read) {
    const size_t groups = current->store_groups.size();
    for (size_t i = 0; i + keep < groups; i++)
        for (Copy& copy : current->store_groups[i]) source_still_there(copy);
    if (only_read) return;
    while (current->store_groups.size() > keep) {
        for (Copy& copy : current->store_groups.front()) land(copy);
        current->store_groups.pop_front();
    }
}

// ---- Clusters --------------------------------------------------------------------------------------------------------

void barrier_cluster_arrive(bool orders_memory) {
    Cluster& cluster = *current->block->cluster;
    if (current->cluster_phase == cluster.phase + 1) fail("barrier.cluster.arrive: this thread has arrived already");
    current->cluster_phase = cluster.phase + 1;
    if (launch.races && orders_memory) join(cluster.clock, current->clock);
    tick(current);
    if (++cluster.arrived < launch.threads * launch.cluster) return;
    cluster.arrived = 0;
    cluster.phase++;
    cluster.completed = cluster.clock;
    for (Thread* thread : cluster.waiting) wake(thread);
    cluster.waiting.clear();
}
void barrier_cluster_wait() {
    Cluster& cluster = *current->block->cluster;
    if (current->cluster_phase == 0) fail("barrier.cluster.wait without an arrive before it");
    while (cluster.phase < current->cluster_phase) {
        cluster.waiting.push_back(current);
        block_on([&cluster] {
            return text("barrier.cluster.wait, where %u of %u threads have arrived", cluster.arrived,
                        launch.threads * launch.cluster);
        });
    }
    if (launch.races) join(current->clock, cluster.completed);
}
uint32_t mapa(uint32_t shared, uint32_t rank) {
    if (rank >= launch.cluster) fail("mapa: block %u of a cluster of %u", rank, launch.cluster);
    return (shared & 0xffffff) | (rank + 1) << 24;
}
void st_async(uint32_t cluster, const void* value, uint32_t bytes, uint32_t barrier) {
    const auto* v = static_cast<const uint8_t*>(value);
    if ((cluster >> 24) != (barrier >> 24)) fail("st.async: the data and its mbarrier are in different blocks");
    signalled({resolve(cluster, bytes, "st.async"),
               nullptr,
               bytes,
               bytes,
               std::vector<uint8_t>(v, v + bytes),
               current,
               nullptr,
               {}},
              barrier, "st.async");
}

// ---- Ordinary accesses by shared address ------------------------------------------------------------------------------

uint32_t shared_address(const void* p) {
    const auto offset = static_cast<const uint8_t*>(p) - current->block->shared;
    if (offset < 0 || offset > launch.shared_bytes)
        fail("shared_address(%p): %s is not this block's shared memory", p, place(p).c_str());
    return static_cast<uint32_t>(offset) + WINDOW;
}
uint8_t* dynamic_shared() { return current->block->shared; }
void read_shared(void* to, uint32_t address, uint32_t bytes, const char* what) {
    const uint8_t* p = resolve(address, bytes, what);
    if (address % bytes) fail("%s: address %#x is not a multiple of %u", what, address, bytes);
    check_read(p, bytes, what);
    memcpy(to, p, bytes);
}
void write_shared(uint32_t address, const void* from, uint32_t bytes, const char* what) {
    uint8_t* p = resolve(address, bytes, what);
    if (address % bytes) fail("%s: address %#x is not a multiple of %u", what, address, bytes);
    check_write(p, bytes, what);
    memcpy(p, from, bytes);
}
void read_global(void* to, const void* p, uint32_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("%s: address %p is not a multiple of %u", what, p, bytes);
    check_read(p, bytes, what);
    memcpy(to, p, bytes);
}
void write_global(void* p, const void* from, uint32_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("%s: address %p is not a multiple of %u", what, p, bytes);
    check_write(p, bytes, what);
    memcpy(p, from, bytes);
    progress();
}
void check_atomic(const void* p, uint32_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("%s: address %p is not a multiple of %u", what, p, bytes);
    check_untimed(p, bytes, what);
    progress();
}
void spin(const char* what) { yield(what); }
void griddepcontrol_wait() { current->block->waited_for_grid = anyone_waited_for_grid = true; }

}  // namespace emulate
