// The location of control words, and which slots are in use.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "arena.hpp"
#include "check.hpp"
#include "shared/leases.hpp"
#include "shared/slab.hpp"

using namespace stepmill;

namespace {

struct Span {
    std::uintptr_t begin, end;
    std::size_t alignment;
};

template <typename Item>
Span span_of(const Item* items, std::uint32_t num) {
    const auto begin = reinterpret_cast<std::uintptr_t>(items);
    return {begin, begin + sizeof(Item) * num, alignof(Item)};
}

std::vector<Span> spans_of(const ServerWords& words, std::uint32_t num) {
    return {
        span_of(words.ticket, num),          span_of(words.row, num),           span_of(words.command, num),
        span_of(words.flags, num),           span_of(words.slot, num),          span_of(words.seed, num),
        span_of(words.blob_offset, num),     span_of(words.blob_bytes, num),    span_of(words.blob_generation, num),
        span_of(words.done, num),            span_of(words.state, num),         span_of(words.fault, num),
        span_of(words.result, num),          span_of(words.payload_offset, num), span_of(words.payload_bytes, num),
        span_of(words.payload_generation, num), span_of(words.hash, num), span_of(words.counters, num),
    };
}

void no_two_control_words_share_a_cache_line() {
    for (std::uint32_t num = 1; num <= 200; ++num) {
        alignas(CACHE_LINE) static std::byte memory[1 << 20];
        const auto begin = reinterpret_cast<std::uintptr_t>(memory);
        const std::uintptr_t workers = begin + ServerWords::learner_bytes(num);
        std::vector<Span> spans = spans_of(ServerWords::at(memory, memory + ServerWords::learner_bytes(num), num), num);
        std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
        CHECK(spans.front().begin == begin);
        for (std::size_t i = 0; i < spans.size(); ++i) {
            const std::uintptr_t limit = i + 1 < spans.size() ? spans[i + 1].begin : workers + ServerWords::worker_bytes(num);
            CHECK(spans[i].begin % CACHE_LINE == 0 && spans[i].begin % spans[i].alignment == 0);
            CHECK(spans[i].end <= limit);
        }
        CHECK(learner_words_bytes(num) == sizeof(LearnerWords) + ServerWords::learner_bytes(num));
        CHECK(learner_words_bytes(num) % CACHE_LINE == 0 && worker_words_bytes(num) % CACHE_LINE == 0);
    }
}

void the_learners_words_lie_apart_from_the_workers() {
    static std::byte learner[1 << 12], worker[1 << 12];
    const ServerWords words = ServerWords::at(learner, worker, 9);
    auto is_in = [](const void* pointer, const std::byte* area) { return pointer >= area && pointer < area + (1 << 12); };
    for (const void* pointer : {static_cast<const void*>(words.ticket), static_cast<const void*>(words.command), static_cast<const void*>(words.episode)}) CHECK(is_in(pointer, learner));
    for (const void* pointer : {static_cast<const void*>(words.done), static_cast<const void*>(words.state), static_cast<const void*>(words.hash)}) CHECK(is_in(pointer, worker));
}

void a_server_is_found_at_its_location() {
    const auto slab = make_arena(3, 5);
    CHECK(slab->server_locations.size() == 15);
    for (std::uint32_t server = 0; server < 15; ++server) {
        const ServerLocation location = slab->server_locations[server];
        CHECK(slab->plan.servers[location.worker][location.local] == server);
    }
    slab->check();
    CHECK(slab->workers[2]->own.current.load() == NO_SERVER);
}

void a_slab_of_another_version_is_refused() {
    const auto slab = make_arena(1, 1);
    slab->pool->own.version = LAYOUT_VERSION + 1;
    bool is_refused = false;
    try {
        slab->check();
    } catch (const std::runtime_error&) {
        is_refused = true;
    }
    CHECK(is_refused);
}

void columns_of_different_slots_do_not_meet() {
    const Column column{.offset = 4096, .slot_stride = 640, .row_bytes = 64};
    CHECK(column.at(0, 0) == 4096 && column.at(0, 9) + 64 == column.at(1, 0) && column.at(3, 2) == 4096 + 3 * 640 + 2 * 64);
}

// Workers 0 and 1 own servers 0, 1 and 2, 3, 4, of two rows each.
SlabPlan plan_split(int only_worker) {
    SlabPlan plan;
    plan.num_rows = 10;
    plan.batch_size = 2;
    plan.servers = {{0, 1}, {2, 3, 4}};
    plan.segments = {4096, 8192};
    plan.observation.push_back(Column{.offset = 128, .slot_stride = 64, .row_bytes = 8, .is_split = true});
    plan.observation.push_back(Column{.offset = 12288, .row_bytes = 8});
    plan.place_rows(only_worker);
    return plan;
}

void rows_of_a_split_column_lie_in_the_segments_of_their_workers() {
    const SlabPlan plan = plan_split(SlabPlan::ALL_WORKERS);
    const Column &split = plan.observation[0], &whole = plan.observation[1];
    CHECK(split.at(0, 0) == 4096 + 128 && split.at(0, 3) == 4096 + 128 + 3 * 8);
    CHECK(split.at(0, 4) == 8192 + 128 && split.at(1, 9) == 8192 + 128 + 64 + 5 * 8);
    CHECK(whole.at(0, 9) == 12288 + 9 * 8);
    CHECK(plan.runs.size() == 2 && plan.runs[0].num == 4 && plan.runs[1].first == 4 && plan.runs[1].num == 6);
}

void a_worker_finds_its_own_rows_without_a_table() {
    const SlabPlan all = plan_split(SlabPlan::ALL_WORKERS);
    for (int worker = 0; worker < 2; ++worker) {
        const SlabPlan own = plan_split(worker);
        CHECK(own.observation[0].places == nullptr);
        for (std::size_t row = worker == 0 ? 0 : 4; row < (worker == 0 ? 4u : 10u); ++row) {
            for (std::size_t slot = 0; slot < 2; ++slot) CHECK(own.observation[0].at(slot, row) == all.observation[0].at(slot, row));
        }
    }
}

// Other mappings have the same writable and read-only pages.
void only_what_is_writable_can_be_written() {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const int fd = memfd_create("stepmill-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(3 * page)) == 0);
    const ByteRange middle{page, 2 * page};
    const SlabMemory worker(fd, 3 * page, std::span(&middle, 1));
    CHECK(pwrite(fd, "x", 1, 0) == 1 && worker.base()[0] == std::byte{'x'});
    worker.base()[page] = std::byte{'y'};
    for (const std::size_t place : {std::size_t{0}, 2 * page}) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);  // so that a sanitizer does not write a report
            worker.base()[place] = std::byte{1};
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    close(fd);
}

void a_range_of_partial_pages_is_refused() {
    const int fd = memfd_create("stepmill-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 1 << 16) == 0);
    const ByteRange odd{64, 128};
    bool is_refused = false;
    try {
        const SlabMemory memory(fd, 1 << 16, std::span(&odd, 1));
    } catch (const std::runtime_error&) {
        is_refused = true;
    }
    CHECK(is_refused);
    close(fd);
}

constexpr std::uint32_t NUM_SLOTS = 5, NUM_PRIVATE = 2;

void a_slot_that_is_held_or_pinned_is_not_assigned() {
    const auto slab = make_arena(1, 1, NUM_SLOTS);
    const auto table = std::make_shared<SlotLeases>(*slab);
    auto lent = [&] { return table->find_free(NUM_PRIVATE, NUM_SLOTS); };
    auto own = [&] { return table->find_free(0, NUM_PRIVATE); };
    CHECK(lent() == 2);
    auto lease = std::make_unique<Lease>(table, 2);
    CHECK(lent() == 3 && table->num_held() == 1);
    table->pin(3);
    table->hold(4);
    CHECK(lent() == -1 && own() == 0);
    table->pin(0, 7);
    CHECK(own() == 1);
    table->pin(1);
    CHECK(own() == -1);
    lease.reset();
    CHECK(lent() == 2);
    table->unpin(0, 7);
    CHECK(own() == 0);
}

// The garbage collector may drop leases in any thread.
void leases_dropped_in_many_threads_are_counted() {
    const auto slab = make_arena(1, 1, NUM_SLOTS);
    const auto table = std::make_shared<SlotLeases>(*slab);
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
        threads.emplace_back([&table, t] {
            for (std::uint32_t i = 0; i < 5000; ++i) {
                const Lease first(table, (t + i) % NUM_SLOTS);
                const Lease second(table, (t + 2 * i) % NUM_SLOTS);
                CHECK(table->is_held((t + i) % NUM_SLOTS));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(table->num_held() == 0);
}

// Arrays outlive the pool: the memory is unmapped with the last of them.
void a_lease_keeps_the_memory_of_a_closed_slab() {
    auto slab = make_arena(1, 1, NUM_SLOTS);
    std::uint64_t& value = observation(*slab, 0);
    value = 42;
    const auto lease = std::make_unique<Lease>(std::make_shared<SlotLeases>(*slab), 0);
    slab.reset();
    CHECK(value == 42);
}

// Exits with 0 in a child if `is_good` holds.
template <typename Check>
void check_in_a_fork(const Check& is_good) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) _exit(is_good() ? 0 : 1);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_forked_child_has_its_own_copy_of_held_slots() {
    const auto slab = make_arena(1, 1, NUM_SLOTS);
    const auto table = std::make_shared<SlotLeases>(*slab);
    const Lease lease(table, 2);
    std::uint64_t &held = observation(*slab, 0, 2), &other = observation(*slab, 0, 3);
    held = 42, other = 43;
    check_in_a_fork([&] {
        held = 7;
        return other == 43;
    });
    CHECK(held == 42);
    int gate[2];
    CHECK(pipe(gate) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte = 0;
        _exit(read(gate[0], &byte, 1) == 1 && held == 42 && other == 44 ? 0 : 1);
    }
    held = 8, other = 44;
    CHECK(write(gate[1], "x", 1) == 1);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(gate[0]), close(gate[1]);
}

// Children of a fork must be able to lock the mutex that delays forks.
void forks_and_slabs_that_come_and_go_in_other_threads_do_not_block_each_other() {
    std::atomic<bool> is_over{false};
    std::thread maker([&is_over] {
        while (!is_over.load()) {
            const auto slab = make_arena(1, 1, NUM_SLOTS);
            const Lease lease(std::make_shared<SlotLeases>(*slab), 2);
        }
    });
    for (int i = 0; i < 50; ++i) {
        check_in_a_fork([] {
            const auto slab = make_arena(1, 1, NUM_SLOTS);
            return slab->plan.num_slots == NUM_SLOTS;
        });
    }
    is_over.store(true);
    maker.join();
}

constexpr int NOT_OPEN = 4096;  // higher than any descriptor of a test

std::size_t num_open() {
    std::size_t count = 0;
    for (int fd = 0; fd < NOT_OPEN; ++fd) count += fcntl(fd, F_GETFD) != -1;
    return count;
}

void a_descriptor_is_closed_once_by_any_number_of_threads() {
    for (int round = 0; round < 200; ++round) {
        const std::size_t before = num_open();
        OwnedFd owned(memfd_create("stepmill-test", MFD_CLOEXEC));
        const int number = owned.number();
        std::vector<std::thread> closers;
        for (int i = 0; i < 4; ++i) closers.emplace_back([&owned] { owned.close(); });
        for (std::thread& closer : closers) closer.join();
        const int foreign = memfd_create("stepmill-foreign", MFD_CLOEXEC);
        CHECK(foreign == number);
        owned.close();
        CHECK(owned.number() == OwnedFd::NONE && fcntl(foreign, F_GETFD) != -1);
        close(foreign);
        CHECK(num_open() == before);
    }
}

}  // namespace

int main() {
    return run_cases({
        {"no two control words share a cache line", no_two_control_words_share_a_cache_line},
        {"a server is found at its location", a_server_is_found_at_its_location},
        {"a slab of another version is refused", a_slab_of_another_version_is_refused},
        {"the learner's words lie apart from the worker's", the_learners_words_lie_apart_from_the_workers},
        {"columns of different slots do not meet", columns_of_different_slots_do_not_meet},
        {"rows of a split column lie in the segments of their workers", rows_of_a_split_column_lie_in_the_segments_of_their_workers},
        {"a worker finds its own rows without a table", a_worker_finds_its_own_rows_without_a_table},
        {"only what is writable can be written", only_what_is_writable_can_be_written},
        {"a range of partial pages is refused", a_range_of_partial_pages_is_refused},
        {"a slot that is held or pinned is not assigned", a_slot_that_is_held_or_pinned_is_not_assigned},
        {"leases dropped in many threads are counted", leases_dropped_in_many_threads_are_counted},
        {"a lease keeps the memory of a closed slab", a_lease_keeps_the_memory_of_a_closed_slab},
        {"a forked child has its own copy of held slots", a_forked_child_has_its_own_copy_of_held_slots},
        {"forks, and slabs that come and go in other threads, do not block each other", forks_and_slabs_that_come_and_go_in_other_threads_do_not_block_each_other},
        {"a descriptor is closed once by any number of threads", a_descriptor_is_closed_once_by_any_number_of_threads},
    });
}
