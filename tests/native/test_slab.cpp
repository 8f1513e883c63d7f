// Where control words lie, and which slots are in use.
#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>

#include "arena.hpp"
#include "check.hpp"
#include "leases.hpp"
#include "slab.hpp"

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
        span_of(words.payload_generation, num),
    };
}

void no_two_control_words_share_a_cache_line() {
    for (std::uint32_t num = 1; num <= 200; ++num) {
        alignas(CACHE_LINE) static std::byte memory[1 << 16];
        const auto begin = reinterpret_cast<std::uintptr_t>(memory);
        std::vector<Span> spans = spans_of(ServerWords::at(memory, num), num);
        std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
        CHECK(spans.front().begin == begin);
        for (std::size_t i = 0; i < spans.size(); ++i) {
            const std::uintptr_t limit = i + 1 < spans.size() ? spans[i + 1].begin : begin + ServerWords::size_bytes(num);
            CHECK(spans[i].begin % CACHE_LINE == 0 && spans[i].begin % spans[i].alignment == 0);
            CHECK(spans[i].end <= limit);
        }
        CHECK(worker_control_bytes(num) == sizeof(WorkerControl) + ServerWords::size_bytes(num));
        CHECK(worker_control_bytes(num) % CACHE_LINE == 0);
    }
}

void a_server_is_found_at_its_seat() {
    const auto slab = make_arena(3, 5);
    CHECK(slab->seats.size() == 15);
    for (std::uint32_t server = 0; server < 15; ++server) {
        const Seat seat = slab->seats[server];
        CHECK(slab->plan.servers[seat.worker][seat.local] == server);
    }
    slab->check();
    CHECK(slab->workers[2]->current.load() == NO_SERVER);
}

void a_slab_of_another_version_is_refused() {
    const auto slab = make_arena(1, 1);
    slab->pool->version = LAYOUT_VERSION + 1;
    bool is_refused = false;
    try {
        slab->check();
    } catch (const std::runtime_error&) {
        is_refused = true;
    }
    CHECK(is_refused);
}

void columns_of_different_slots_do_not_meet() {
    const Column column{4096, 640, 64};
    CHECK(column.at(0, 0) == 4096 && column.at(0, 9) + 64 == column.at(1, 0) && column.at(3, 2) == 4096 + 3 * 640 + 2 * 64);
}

constexpr std::uint32_t NUM_SLOTS = 5, NUM_PRIVATE = 2;

void a_slot_that_is_held_or_pinned_is_not_given_away() {
    const auto slab = make_arena(1, 1);
    const auto book = std::make_shared<SlotBook>(slab->memory, NUM_SLOTS);
    CHECK(book->find_free(NUM_PRIVATE) == 2);
    auto lease = std::make_unique<Lease>(book, 2);
    CHECK(book->find_free(NUM_PRIVATE) == 3 && book->num_held() == 1);
    book->pin(3);
    book->hold(4);
    CHECK(book->find_free(NUM_PRIVATE) == 0);
    book->pin(0, 7);
    CHECK(book->find_private(NUM_PRIVATE) == 1);
    book->pin(1);
    CHECK(book->find_free(NUM_PRIVATE) == -1);
    lease.reset();
    CHECK(book->find_free(NUM_PRIVATE) == 2);
    book->unpin(0, 7);
    CHECK(book->find_private(NUM_PRIVATE) == 0);
}

// Leases are dropped by whatever thread collects the garbage.
void leases_dropped_in_many_threads_are_counted() {
    const auto slab = make_arena(1, 1);
    const auto book = std::make_shared<SlotBook>(slab->memory, NUM_SLOTS);
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
        threads.emplace_back([&book, t] {
            for (std::uint32_t i = 0; i < 5000; ++i) {
                const Lease first(book, (t + i) % NUM_SLOTS);
                const Lease second(book, (t + 2 * i) % NUM_SLOTS);
                CHECK(book->is_held((t + i) % NUM_SLOTS));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(book->num_held() == 0);
}

// Arrays outlive the pool: the memory goes with the last of them.
void a_lease_keeps_the_memory_of_a_slab_that_is_gone() {
    auto slab = make_arena(1, 1);
    std::uint64_t& value = observation(*slab, 0);
    value = 42;
    const auto lease = std::make_unique<Lease>(std::make_shared<SlotBook>(slab->memory, NUM_SLOTS), 0);
    slab.reset();
    CHECK(value == 42);
}

constexpr int NOT_OPEN = 4096;  // no descriptor of a test is as high

std::size_t num_open() {
    std::size_t count = 0;
    for (int fd = 0; fd < NOT_OPEN; ++fd) count += fcntl(fd, F_GETFD) != -1;
    return count;
}

void a_duplication_that_fails_halfway_leaves_nothing_open() {
    const int fd = memfd_create("stepmill-test", MFD_CLOEXEC);
    const std::size_t before = num_open();
    bool is_refused = false;
    try {
        const OwnFds fds(std::vector<int>{fd, fd, NOT_OPEN, fd});
    } catch (const std::system_error&) {
        is_refused = true;
    }
    CHECK(is_refused);
    CHECK(num_open() == before);
    close(fd);
}

void a_descriptor_is_closed_once_whoever_asks() {
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
        {"a server is found at its seat", a_server_is_found_at_its_seat},
        {"a slab of another version is refused", a_slab_of_another_version_is_refused},
        {"columns of different slots do not meet", columns_of_different_slots_do_not_meet},
        {"a slot that is held or pinned is not given away", a_slot_that_is_held_or_pinned_is_not_given_away},
        {"leases dropped in many threads are counted", leases_dropped_in_many_threads_are_counted},
        {"a lease keeps the memory of a slab that is gone", a_lease_keeps_the_memory_of_a_slab_that_is_gone},
        {"a duplication that fails halfway leaves nothing open", a_duplication_that_fails_halfway_leaves_nothing_open},
        {"a descriptor is closed once, whoever asks", a_descriptor_is_closed_once_whoever_asks},
    });
}
