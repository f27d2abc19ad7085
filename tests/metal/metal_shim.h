// Enough of <metal_stdlib> to compile the body of a Metal kernel with g++ and run it on the CPU.
//
// Each thread of a threadgroup is a fiber (ucontext to begin with, then setjmp, which makes no system call) on one OS
// thread; a fiber runs until it meets a barrier or a SIMD
// operation, then the next one's turn comes, in an order that the caller chooses: forward, reverse, or shuffled anew in
// each round. A result that depends on the order is a missing barrier. Reported are: barriers that not all threads reach or
// that they reach at different lines, and indices outside a buffer. Threadgroup memory is filled with NaN for each
// threadgroup. Everything lives in one translation unit per library, so there are no inline variables (C++14, like MSL).
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using uint = unsigned;
using ushort = uint16_t;
using uchar = uint8_t;
using half = _Float16;

template <class To, class From>
static To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// As MLX's own: a float that is rounded to its upper half.
struct bfloat16_t {
    uint16_t word;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) {
        uint bits = as_type<uint>(value);
        word = value != value ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    operator float() const { return as_type<float>(uint(word) << 16); }
};

struct uint3 {
    uint x, y, z;
};

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

using std::exp;
using std::log;

namespace emu {

constexpr uint SIMD = 32;
constexpr uint MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10;
constexpr size_t MOST_SHARED = 64 << 10;

struct Fiber {
    ucontext_t context; // to start it
    jmp_buf place;      // where it goes on
    bool started, done;
    int line;
    const char *what;
};

// Those that meet: 1 = the threadgroup, 2 + i = SIMD group i.
struct Group {
    uint arrived, first; // how many have come since the last meeting, and who came first
    long generation;
    double result; // of a SIMD operation
};

static Fiber fibers[MOST_THREADS];
static char *stacks;
static jmp_buf scheduler;
static uint current, alive;
static long progress; // arrivals and ends, to see that a round brought none
static uint3 group_index, group_size, dispatched;
static Group groups[2 + MOST_THREADS / SIMD];
static double slots[MOST_THREADS];
static void (*run_body)(void *);
static void *run_argument;
static bool failed;
static char message[512];
static unsigned char shared[MOST_SHARED];
static size_t shared_used, shared_most; // of the running threadgroup; of any since the library was loaded

static uint thread_count() { return group_size.x * group_size.y * group_size.z; }

[[noreturn]] static void to_scheduler() { _longjmp(scheduler, 1); }

// Let others run.
__attribute__((noinline)) static void yield() {
    if (!_setjmp(fibers[current].place)) to_scheduler();
}

__attribute__((noinline)) static void resume(Fiber &fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Give up: the scheduler ends the run and `message` says why.
template <class... Args>
[[noreturn]] static void fail(const char *format, Args... args) {
    failed = true;
    snprintf(message, sizeof message, format, args...);
    to_scheduler(); // and never resumed
}

// A buffer that knows its size.
template <class T>
struct Span {
    T *data;
    size_t size;
    const char *name;
    T &operator[](size_t i) const {
        if (i >= size) fail("thread %u: %s[%zu], it has %zu elements", current, name, i, size);
        return data[i];
    }
};

// ---- threadgroup memory: `threadgroup T name[n];` becomes a view of one of these, the same for all threads -------------

static size_t shared_offsets[16];

template <class T, size_t N>
static Span<T> share(uint which, const char *name) {
    if (shared_offsets[which] == size_t(-1)) { // the first thread to get here
        size_t start = (shared_used + 15) / 16 * 16;
        if (start + sizeof(T) * N > MOST_SHARED) fail("more than %zu bytes of threadgroup memory", MOST_SHARED);
        shared_offsets[which] = start;
        shared_used = start + sizeof(T) * N;
        if (shared_used > shared_most) shared_most = shared_used;
    }
    return {reinterpret_cast<T *>(shared + shared_offsets[which]), N, name};
}

// ---- meeting points ----------------------------------------------------------------------------------------------------

static uint lanes() {
    uint first = current / SIMD * SIMD, count = thread_count() - first;
    return count < SIMD ? count : SIMD;
}

// Wait until all `count` threads of a group are here; the last one calls `finish`. They must come to the same line.
template <class F>
static void meet(uint which, uint count, const char *what, int line, F finish) {
    Fiber &self = fibers[current];
    Group &group = groups[which];
    self.what = what;
    self.line = line;
    if (!group.arrived) group.first = current;
    const Fiber &other = fibers[group.first];
    if (other.line != line)
        fail("thread %u is at %s in line %d, thread %u at %s in line %d", current, what, line, group.first, other.what,
             other.line);
    progress++;
    long generation = group.generation;
    if (++group.arrived == count) {
        group.arrived = 0;
        group.generation++;
        finish(group);
    }
    while (group.generation == generation) yield();
}

static void meet_threadgroup(int line) {
    meet(1, thread_count(), "threadgroup_barrier", line, [](Group &) {});
}

static void meet_simdgroup(int line) {
    meet(2 + current / SIMD, lanes(), "simdgroup_barrier", line, [](Group &) {});
}

// The last lane to come combines; nobody comes to the next operation's end before all have read the result.
template <class T, class F>
static T reduce(T value, F combine, const char *what, int line) {
    uint first = current / SIMD * SIMD, count = lanes(), which = 2 + current / SIMD;
    slots[current] = double(value);
    meet(which, count, what, line, [=](Group &group) {
        T result = T(slots[first]);
        for (uint i = 1; i < count; i++) result = combine(result, T(slots[first + i]));
        group.result = double(result);
    });
    return T(groups[which].result);
}

// ---- the scheduler -----------------------------------------------------------------------------------------------------

static void entry() {
    run_body(run_argument);
    fibers[current].done = true;
    alive--;
    progress++;
    to_scheduler();
}

// Deterministic pseudo-random numbers (xorshift).
static uint next_random(uint &state) {
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

static void run_threadgroup(uint &order) {
    static uint turns[MOST_THREADS];
    uint count = thread_count();
    alive = count;
    memset(groups, 0, sizeof groups);
    memset(shared, 0xff, sizeof shared);
    memset(shared_offsets, 0xff, sizeof shared_offsets);
    shared_used = 0;
    for (uint i = 0; i < count; i++) {
        Fiber &fiber = fibers[i];
        fiber.started = fiber.done = false;
        fiber.line = 0;
        turns[i] = order == 1 ? count - 1 - i : i;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
    }
    while (alive && !failed) {
        long before = progress;
        if (order > 1)
            for (uint i = count - 1; i > 0; i--) {
                uint j = next_random(order) % (i + 1), kept = turns[i];
                turns[i] = turns[j];
                turns[j] = kept;
            }
        for (uint i = 0; i < count && !failed; i++) {
            current = turns[i];
            if (!fibers[current].done) resume(fibers[current]);
        }
        if (alive && !failed && before == progress) {
            failed = true;
            for (uint i = 0; i < count; i++)
                if (!fibers[i].done)
                    snprintf(message, sizeof message, "thread %u waits at %s in line %d for threads that have ended", i,
                             fibers[i].what, fibers[i].line);
        }
    }
}

// All threads of a grid, in threadgroups of at most `group` threads; those at the edge are smaller, as Metal's
// dispatchThreads makes them. order: 0 forward, 1 reverse, more = seed of a shuffle. The text of a failure, or null.
static const char *run(const uint *grid, const uint *group, uint order, void (*body)(void *), void *argument) {
    if (!stacks) {
        void *memory = mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return "no memory for stacks";
        stacks = static_cast<char *>(memory);
    }
    failed = false;
    run_body = body;
    run_argument = argument;
    uint3 count = {(grid[0] + group[0] - 1) / group[0], (grid[1] + group[1] - 1) / group[1],
                   (grid[2] + group[2] - 1) / group[2]};
    for (uint z = 0; z < count.z; z++)
        for (uint y = 0; y < count.y; y++)
            for (uint x = 0; x < count.x; x++) {
                uint3 left = {grid[0] - x * group[0], grid[1] - y * group[1], grid[2] - z * group[2]};
                group_index = {x, y, z};
                group_size = {left.x < group[0] ? left.x : group[0], left.y < group[1] ? left.y : group[1],
                              left.z < group[2] ? left.z : group[2]};
                dispatched = {group[0], group[1], group[2]};
                run_threadgroup(order);
                if (failed) return message;
            }
    return nullptr;
}

static uint3 thread_in_group() {
    return {current % group_size.x, current / group_size.x % group_size.y, current / group_size.x / group_size.y};
}

static uint3 thread_in_grid() {
    uint3 t = thread_in_group();
    return {group_index.x * dispatched.x + t.x, group_index.y * dispatched.y + t.y, group_index.z * dispatched.z + t.z};
}

} // namespace emu

// Functions, because what a thread reads after a barrier must be its own.
#define thread_position_in_threadgroup (emu::thread_in_group())
#define thread_position_in_grid (emu::thread_in_grid())
#define threadgroup_position_in_grid (emu::group_index)
#define threads_per_threadgroup (emu::group_size)
#define thread_index_in_simdgroup (emu::current % emu::SIMD)
#define simdgroup_index_in_threadgroup (emu::current / emu::SIMD)

#define threadgroup_barrier(flags) ((void)(flags), emu::meet_threadgroup(__LINE__))
#define simdgroup_barrier(flags) ((void)(flags), emu::meet_simdgroup(__LINE__))
#define simd_sum(v) emu::reduce((v), [](auto a, auto b) { return decltype(a)(a + b); }, "simd_sum", __LINE__)
#define simd_max(v) emu::reduce((v), [](auto a, auto b) { return a > b ? a : b; }, "simd_max", __LINE__)
#define simd_min(v) emu::reduce((v), [](auto a, auto b) { return a < b ? a : b; }, "simd_min", __LINE__)

// Address spaces. Threadgroup arrays are rewritten before compilation; a pointer into one is an ordinary pointer.
#define device
#define constant static const
#define thread
#define kernel
