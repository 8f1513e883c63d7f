// Which result slots are in use: by arrays that the user holds, and by envs whose newest result lies there or will.
// Counts are private to the process. Knows no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "slab.hpp"

namespace stepmill {

// Shared by the ledger and every lease. A lease may be dropped in any thread, after the pool was closed too.
//
// A forked child has copies of the arrays that this process holds, and no say in when their slots are written again. So it gets
// the slots that are held as private memory, at the same addresses: copied before the fork, and moved there in the child.
class SlotBook final : AtFork {
   public:
    explicit SlotBook(const Slab& slab) : memory_(slab.memory), held_(slab.plan.num_slots), pinned_(slab.plan.num_slots) {
        for (std::uint32_t slot = 0; slot < slab.plan.num_slots; ++slot) lent_.push_back(slab.plan.lent_ranges(slot));
        copies_.reserve(lent_.size() * slab.plan.observation.size());  // a fork must not fail for want of it
        const std::lock_guard no_fork(forks());
        join();
    }
    ~SlotBook() {
        const std::lock_guard no_fork(forks());
        leave();
    }

    void hold(std::uint32_t slot) noexcept { held_[slot].fetch_add(1, std::memory_order_relaxed); }
    void release(std::uint32_t slot) noexcept { held_[slot].fetch_sub(1, std::memory_order_acq_rel); }
    bool is_held(std::uint32_t slot) const noexcept { return held_[slot].load(std::memory_order_acquire) != 0; }

    // Rows whose newest result is in the slot, or will be. The ledger's alone.
    void pin(std::uint32_t slot, std::uint32_t rows = 1) noexcept { pinned_[slot] += rows; }
    void unpin(std::uint32_t slot, std::uint32_t rows = 1) noexcept { pinned_[slot] -= rows; }
    bool is_pinned(std::uint32_t slot) const noexcept { return pinned_[slot] != 0; }

    std::uint32_t num_slots() const noexcept { return static_cast<std::uint32_t>(pinned_.size()); }
    std::uint32_t num_held() const noexcept {
        std::uint32_t held = 0;
        for (const auto& count : held_) held += count.load(std::memory_order_relaxed) != 0;
        return held;
    }

    // Where all rows together may be written: the first lease slot that is free, else a private slot nobody needs, else none.
    int find_free(std::uint32_t private_slots) const noexcept {
        for (std::uint32_t slot = private_slots; slot < num_slots(); ++slot) {
            if (!is_held(slot) && !is_pinned(slot)) return static_cast<int>(slot);
        }
        return find_private(private_slots);
    }

    int find_private(std::uint32_t private_slots) const noexcept {
        for (std::uint32_t slot = 0; slot < private_slots; ++slot) {
            if (!is_pinned(slot)) return static_cast<int>(slot);
        }
        return -1;
    }

   private:
    // Pages of a slot, copied for a child.
    struct Copy {
        std::byte* place;
        void* memory;
        std::size_t size;
    };

    void before_fork() noexcept override {
        for (std::uint32_t slot = 0; slot < num_slots(); ++slot) {
            if (is_held(slot) && !copy(slot)) hold(slot);  // no memory: the slot is never written again, here and there
        }
    }
    void after_fork_in_parent() noexcept override {
        for (const Copy& copy : copies_) munmap(copy.memory, copy.size);
        copies_.clear();
    }
    void after_fork_in_child() noexcept override {
        for (const Copy& copy : copies_) mremap(copy.memory, copy.size, copy.size, MREMAP_MAYMOVE | MREMAP_FIXED, copy.place);
        copies_.clear();
    }

    bool copy(std::uint32_t slot) noexcept {
        static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        for (const ByteRange range : lent_[slot]) {
            const std::size_t start = range.start / page * page, size = (range.stop - start + page - 1) / page * page;
            void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) return false;
            std::memcpy(memory, memory_->base() + start, size);
            copies_.push_back({memory_->base() + start, memory, size});
        }
        return true;
    }

    std::shared_ptr<SlabMemory> memory_;  // arrays of a lease outlive the pool
    std::vector<std::atomic<std::uint32_t>> held_;
    std::vector<std::uint32_t> pinned_;
    std::vector<std::vector<ByteRange>> lent_;  // by slot
    std::vector<Copy> copies_;                  // while a fork is under way
};

// Base object of a leased array: while it lives, its slot is not written.
class Lease {
   public:
    Lease(std::shared_ptr<SlotBook> book, std::uint32_t slot) : book_(std::move(book)), slot_(slot) { book_->hold(slot_); }
    ~Lease() { book_->release(slot_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

   private:
    std::shared_ptr<SlotBook> book_;
    std::uint32_t slot_;
};

}  // namespace stepmill
