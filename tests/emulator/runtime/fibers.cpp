// Fibers, their scheduling, and their rendezvous.
#include "runtime.h"

#include <cstdarg>
#include <csetjmp>
#include <csignal>
#include <memory>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulate {

const Here* here = nullptr;
Thread* current = nullptr;
Launch launch;
bool anyone_waited_for_grid = false;

namespace {

constexpr size_t STACK = 256 << 10;
std::vector<uint8_t*> free_stacks;
std::vector<Thread*> runnable;
std::vector<std::unique_ptr<Cluster>> running;
std::string message;
jmp_buf failed;
uint64_t random_state;
uint64_t idle_spins;

#if defined(__x86_64__)
void* scheduler = nullptr;
extern "C" void emulate_switch(void** save, void* load);
asm(R"(
.text
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch, .-emulate_switch
)");
#else
ucontext_t scheduler_context;
void* scheduler = &scheduler_context;
void emulate_switch(void** save, void* load) {
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}
#endif

void fiber_main() {
    launch.kernel(launch.params);
    finish_thread(*current);
    current->done = true;
    progress();
    emulate_switch(&current->stack_pointer, scheduler);
    __builtin_unreachable();
}

void start(Thread& thread) {
    if (free_stacks.empty()) {
        void* fresh = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(fresh, 4096, PROT_NONE);
        free_stacks.push_back(static_cast<uint8_t*>(fresh));
    }
    thread.stack = free_stacks.back();
    free_stacks.pop_back();
#if defined(__x86_64__)
    auto* top = reinterpret_cast<uint64_t*>(thread.stack + STACK) - 1;  // as if called: 8 bytes off 16
    *--top = reinterpret_cast<uint64_t>(&fiber_main);  // where the first switch returns to
    thread.stack_pointer = top - 6;
#else
    auto* context = reinterpret_cast<ucontext_t*>(thread.stack + 4096);
    getcontext(context);
    context->uc_stack.ss_sp = thread.stack + 8192;
    context->uc_stack.ss_size = STACK - 8192;
    makecontext(context, fiber_main, 0);
    thread.stack_pointer = context;
#endif
    runnable.push_back(&thread);
}

std::string ranges(const std::vector<uint32_t>& indices) {
    std::string out;
    for (size_t i = 0; i < indices.size();) {
        size_t j = i;
        while (j + 1 < indices.size() && indices[j + 1] == indices[j] + 1) j++;
        out += (out.empty() ? "" : ", ") + (i == j ? text("%u", indices[i]) : text("%u-%u", indices[i], indices[j]));
        i = j + 1;
    }
    return out;
}

[[noreturn]] void report_deadlock() {
    std::string report = "deadlock";
    for (auto& cluster : running)
        for (Block& block : cluster->blocks) {
            std::map<std::string, std::vector<uint32_t>> groups;
            for (Thread& thread : block.threads)
                groups[thread.done ? "have ended" : "wait at " + thread.waits_for()].push_back(thread.index);
            for (auto& [what, indices] : groups)
                report += "\n  " + block.name + ", threads " + ranges(indices) + ": " + what;
        }
    message = report;
    longjmp(failed, 1);
}

std::unique_ptr<Cluster> new_cluster(uint32_t number, std::vector<uint8_t*>& shared_free) {
    auto cluster = std::make_unique<Cluster>();
    cluster->blocks.resize(launch.cluster);
    const uint32_t total = launch.threads * launch.cluster;
    for (uint32_t rank = 0; rank < launch.cluster; rank++) {
        Block& block = cluster->blocks[rank];
        const uint32_t linear = number * launch.cluster + rank;
        const Index at{linear % launch.grid[0], linear / launch.grid[0] % launch.grid[1],
                       linear / launch.grid[0] / launch.grid[1]};
        block.cluster = cluster.get();
        block.rank = rank;
        block.name = text("block (%u, %u, %u)", at.x, at.y, at.z);
        block.shared = shared_free.back();
        shared_free.pop_back();
        poison_shared(block);
        block.threads.resize(launch.threads);
        block.warps.resize((launch.threads + 31) / 32);
        block.alive = launch.threads;
        for (uint32_t i = 0; i < launch.threads; i++) {
            Thread& thread = block.threads[i];
            thread.here = Here{{i, 0, 0}, at, {launch.threads, 1, 1}, {launch.grid[0], launch.grid[1], launch.grid[2]}};
            thread.block = &block;
            thread.warp = &block.warps[i / 32];
            thread.index = i;
            thread.lane = i % 32;
            thread.clock_index = rank * launch.threads + i;
            if (launch.races) {
                thread.clock.assign(total, 0);
                thread.clock[thread.clock_index] = 1;
            }
            start(thread);
        }
    }
    cluster->alive = total;
    return cluster;
}

}  // namespace

std::string text(const char* format, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

void fail(const char* format, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    message = buffer;
    if (current) message = current->block->name + text(", thread %u: ", current->index) + message;
    longjmp(failed, 1);  // fibers are abandoned: kernels own nothing
}

uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>((random_state >> 33) * n >> 31);
}

void join(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

uint32_t& entry(Clock& clock, uint32_t index) {
    if (clock.size() <= index) clock.resize(index + 1);
    return clock[index];
}

void tick(Thread* thread) {
    if (launch.races) thread->clock[thread->clock_index]++;
}

void progress() { idle_spins = 0; }

void block_on(std::function<std::string()> what) {
    current->waits_for = std::move(what);
    emulate_switch(&current->stack_pointer, scheduler);
}

void wake(Thread* thread) {
    progress();
    runnable.push_back(thread);
}

void yield(const char* what) {
    if (++idle_spins > 200000) fail("livelock: every running thread spins, this one at %s, and nothing changes", what);
    runnable.push_back(current);
    emulate_switch(&current->stack_pointer, scheduler);
}

void meet(Meeting& meeting, const char* what, int line, uint32_t expected, void* argument, void (*finish)(void**),
          bool waits, bool orders_memory) {
    if (meeting.present.empty()) {
        meeting.what = what;
        meeting.line = line;
        meeting.expected = expected;
        meeting.clock.clear();
    } else if (strcmp(meeting.what, what) != 0 || meeting.line != line || meeting.expected != expected) {
        fail("divergent %s (line %d, %u threads): thread %u of the same group is at %s (line %d, %u threads)", what,
             line, expected, meeting.present[0]->index, meeting.what, meeting.line, meeting.expected);
    }
    for (Thread* other : meeting.waiting)
        if (other == current) fail("%s: this thread has arrived already", what);
    meeting.present.push_back(current);
    meeting.arguments.push_back(argument);
    if (orders_memory && launch.races) join(meeting.clock, current->clock);
    if (meeting.present.size() < expected) {
        if (!waits) {
            tick(current);
            return;
        }
        meeting.waiting.push_back(current);
        block_on([&meeting] {
            const std::string line = meeting.line ? text(" (line %d)", meeting.line) : "";
            return meeting.what + line +
                   text(", where %zu of %u threads have arrived", meeting.present.size(), meeting.expected);
        });
        return;
    }
    if (finish) {
        // Sorted by lane: instructions see arguments in lane order, not in order of arrival.
        std::vector<void*> sorted(32, nullptr);
        for (size_t i = 0; i < meeting.present.size(); i++) sorted[meeting.present[i]->lane] = meeting.arguments[i];
        finish(sorted.data());
    }
    std::vector<Thread*> woken;
    woken.swap(meeting.waiting);
    meeting.present.clear();
    meeting.arguments.clear();
    Clock clock;
    clock.swap(meeting.clock);
    if (waits) woken.push_back(current);
    for (Thread* thread : woken) {
        if (orders_memory && launch.races) {
            join(thread->clock, clock);
            tick(thread);
        }
        if (thread != current) wake(thread);
    }
    if (!waits) tick(current);
}

}  // namespace emulate

using namespace emulate;

namespace {

// A plain access of an unmapped address, such as a null pointer, ends the launch and not the process.
void on_wild_access(int, siginfo_t* info, void*) {
    fail("access of address %p, which is no memory (a null or wild pointer, or a stack beyond %zu bytes)",
         info->si_addr, STACK);
}

struct WildAccessGuard {
    struct sigaction before;
    stack_t stack_before;
    WildAccessGuard() {
        static uint8_t signal_stack[64 << 10];
        stack_t stack{};
        stack.ss_sp = signal_stack;
        stack.ss_size = sizeof signal_stack;
        sigaltstack(&stack, &stack_before);
        struct sigaction action{};
        action.sa_sigaction = on_wild_access;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &before);
    }
    ~WildAccessGuard() {
        sigaction(SIGSEGV, &before, nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

}  // namespace

// Run one launch. Returns null, or an error message, valid until the next call.
extern "C" const char* emulate_run(const Launch* what) {
    launch = *what;
    static std::unique_ptr<WildAccessGuard> guard;  // survives a failure's longjmp
    guard = std::make_unique<WildAccessGuard>();
    struct Remove { ~Remove() { guard.reset(); } } remove;
    random_state = 0x9E3779B97F4A7C15ull * (launch.seed + 1);
    runnable.clear();
    running.clear();
    idle_spins = 0;
    current = nullptr;
    message.clear();
    anyone_waited_for_grid = false;
    const uint32_t clusters = launch.grid[0] * launch.grid[1] * launch.grid[2] / launch.cluster;
    const uint32_t resident = launch.resident < clusters ? launch.resident : clusters;
    static std::vector<uint8_t*> shared_free;
    shared_free.clear();
    for (uint32_t i = 0; i < resident * launch.cluster; i++)
        shared_free.push_back(allocate("shared memory", launch.shared_bytes, 0));
    static uint32_t next;
    next = 0;
    if (setjmp(failed)) {
        for (auto& cluster : running)
            for (Block& block : cluster->blocks)
                for (Thread& thread : block.threads)
                    if (thread.stack) free_stacks.push_back(thread.stack);
        runnable.clear();
        running.clear();
        current = nullptr;
        return message.c_str();
    }
    while (next < clusters || !running.empty()) {
        while (next < clusters && running.size() < resident) running.push_back(new_cluster(next++, shared_free));
        if (runnable.empty()) report_deadlock();
        // Three scheduling policies: random, newest first (some threads run far ahead), oldest first.
        const uint32_t size = runnable.size(), habit = launch.seed % 3;
        const uint32_t chosen = habit == 0 || random_below(8) == 0 ? random_below(size) : habit == 1 ? size - 1 : 0;
        current = runnable[chosen];
        runnable[chosen] = runnable.back();
        runnable.pop_back();
        here = &current->here;
        emulate_switch(&scheduler, current->stack_pointer);
        if (!current->done) continue;
        Thread* ended = current;
        free_stacks.push_back(ended->stack);
        ended->stack = nullptr;
        Block& block = *ended->block;
        if (--block.alive == 0) finish_block(block);
        Cluster* cluster = block.cluster;
        if (--cluster->alive == 0) {
            for (Block& each : cluster->blocks) shared_free.push_back(each.shared);
            for (auto it = running.begin(); it != running.end(); ++it)
                if (it->get() == cluster) {
                    running.erase(it);
                    break;
                }
        }
    }
    current = nullptr;
    if (!launch.dependent || anyone_waited_for_grid) return nullptr;
    message =
        "the launch ended without griddepcontrol_wait: the kernel after it could then start before the one ahead of it has ended";
    return message.c_str();
}
