// The emulated machine: blocks of fibers, memory with a state per byte, and errors.
//
// CUDA threads are fibers of one host thread, run in an order set by a seed. Device memory (shared and global) is
// one arena with a state for every byte; kernels are compiled with -fsanitize=thread and our own hooks, so
// every plain load and store is checked too. Asynchronous copies and MMAs complete only when they are waited for.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace emulate {

struct Index { uint32_t x, y, z; };
struct Here { Index thread, block, block_dim, grid; };  // threadIdx etc.

struct Thread;
struct Warp;
struct Block;
struct Cluster;

// ---- Happens-before: what a thread has seen of every other thread of its cluster (a vector clock), and behind those
// of every mbarrier: so many of its phases it knows to be complete ----
using Clock = std::vector<uint32_t>;
void join(Clock& into, const Clock& from);
uint32_t& entry(Clock& clock, uint32_t index);

// A rendezvous of a fixed number of threads; the last to arrive does the work for all.
struct Meeting {
    const char* what = nullptr;
    int line = 0;
    uint32_t expected = 0;
    std::vector<Thread*> present, waiting;  // bar.arrive is present without waiting
    std::vector<void*> arguments;
    Clock clock;
};

struct Copy {  // an asynchronous copy in flight
    uint8_t* to;
    const uint8_t* from;
    uint32_t bytes, valid;
    std::vector<uint8_t> value;  // st.async: the value itself; bulk stores: the source when it was issued
    Thread* issuer;
    Block* target;               // whose barrier it signals
    Clock clock;
};

struct Barrier {  // an mbarrier
    uint32_t arrivals, pending;
    int64_t bytes;
    uint32_t phase;        // number completed
    uint32_t clock_index;
    std::vector<Thread*> waiting;
    std::deque<Copy> copies;            // bulk copies and st.async that will signal it
    std::vector<Thread*> noinc;         // threads whose cp.async will arrive on it
    Clock clock, completed;
};

struct Product {  // accumulators of a warp with wgmma in flight
    std::vector<void*> registers;       // each lane's
    std::vector<uint32_t> values;       // [lane][count]
    int count;
    uint64_t last;                      // the number of the last instruction on them
};
struct Operand { uint64_t instruction; std::vector<uint8_t> seen; std::vector<const uint8_t*> rows; std::string name; };

struct Warp {
    std::map<uint32_t, Meeting> meetings;  // by lane mask
    std::vector<Product> products;
    std::vector<Operand> operands;
    std::deque<uint64_t> groups;           // the last instruction of each committed group
    uint64_t instructions = 0;
    bool fenced = false;
};

struct Thread {
    Here here;
    Block* block;
    Warp* warp;
    uint32_t index, lane, clock_index;
    void* stack_pointer = nullptr;
    uint8_t* stack = nullptr;
    bool done = false;
    std::function<std::string()> waits_for;  // for deadlock reports
    std::vector<Copy> copies;              // cp.async not yet committed
    std::deque<std::vector<Copy>> groups;  // and committed
    std::vector<Copy> stores;              // bulk stores not yet committed
    std::deque<std::vector<Copy>> store_groups;
    uint32_t cluster_phase = 0;            // the phase it arrived at
    Clock clock;
};

struct Block {
    Cluster* cluster;
    uint32_t rank, alive = 0;
    uint8_t* shared;
    std::string name;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting barriers[16];
    std::map<uint32_t, Barrier> mbarriers;  // by shared address
    bool waited_for_grid = false;
    std::vector<std::pair<uint8_t*, uint32_t>> unfenced;  // generic writes to shared memory since the last proxy fence
};

struct Cluster {
    std::vector<Block> blocks;
    uint32_t alive = 0, arrived = 0, phase = 0;  // of barrier.cluster
    uint32_t mbarriers = 0;
    std::vector<Thread*> waiting;
    Clock clock, completed;
};

struct Launch {
    void (*kernel)(const void*);
    const void* params;
    uint32_t grid[3], threads, shared_bytes, cluster, resident, seed;
    bool races, dependent;
};

// ---- fibers.cpp ----
extern const Here* here;
extern Thread* current;
extern Launch launch;
extern bool anyone_waited_for_grid;
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint32_t random_below(uint32_t n);
void block_on(std::function<std::string()> what);  // until someone wakes this thread
void wake(Thread* thread);
void yield(const char* what);            // a spin on global memory: lets others run
void progress();                         // wakes spins: something changed
void tick(Thread* thread);
// Joins `threads` of them; `finish` is called once, with every thread's argument. False for bar.arrive.
void meet(Meeting& meeting, const char* what, int line, uint32_t expected, void* argument, void (*finish)(void**),
          bool waits, bool orders_memory);

// ---- memory.cpp ----
constexpr uint32_t WINDOW = 1024;  // shared addresses start here, as on hardware: 0 is not a valid one
enum State : uint8_t { ADDRESSABLE = 1, IN_FLIGHT = 2, UNFENCED = 4, MBARRIER = 8, DEPENDENT = 16 };
enum class Proxy { generic, async };
uint8_t* allocate(const char* name, size_t bytes, uint8_t extra_state);
void free_everything();
void poison_shared(Block& block);
void check_read(const void* p, size_t bytes, const char* what, Proxy proxy = Proxy::generic);
void check_write(const void* p, size_t bytes, const char* what, Proxy proxy = Proxy::generic);
void check_untimed(const void* p, size_t bytes, const char* what);  // an atomic: does not race with other atomics
void set_state(const void* p, size_t bytes, uint8_t bit, bool on);
std::string place(const void* p);
uint8_t* resolve(uint32_t address, size_t bytes, const char* what);  // an address of this block or of its cluster
uint8_t* resolve_local(uint32_t address, size_t bytes, const char* what);
void finish_thread(Thread& thread);
void finish_block(Block& block);

}  // namespace emulate
