// Which result slots are in use: by arrays that the user holds, and by the newest or next results of envs.
// The counts are private to the process. Needs no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "shared/slab.hpp"

namespace stepmill {

// Shared by the pool state and all leases. A lease may be dropped in any thread, also after the pool is closed.
//
// A forked child has copies of the arrays that its parent holds, but cannot prevent the parent from writing to their slots. So the held
// slots become private memory of the child at the same addresses: copied before the fork, and moved there in the child.
class SlotLeases final : AtFork {
   public:
    explicit SlotLeases(const Slab& slab) : memory_(slab.memory), held_(slab.plan.num_slots), pinned_(slab.plan.num_slots) {
        for (std::uint32_t slot = 0; slot < slab.plan.num_slots; ++slot) lent_.push_back(slab.plan.lent_ranges(slot));
        copies_.reserve(lent_.size() * slab.plan.observation.size());  // no allocation during a fork
        const std::lock_guard no_fork(forks());
        join();
    }
    ~SlotLeases() {
        const std::lock_guard no_fork(forks());
        leave();
    }

    void hold(std::uint32_t slot) noexcept { held_[slot].fetch_add(1, std::memory_order_relaxed); }
    void release(std::uint32_t slot) noexcept { held_[slot].fetch_sub(1, std::memory_order_acq_rel); }
    bool is_held(std::uint32_t slot) const noexcept { return held_[slot].load(std::memory_order_acquire) != 0; }

    // Counts the rows with their newest or next result in the slot. Called only by the pool state.
    void pin(std::uint32_t slot, std::uint32_t rows = 1) noexcept { pinned_[slot] += rows; }
    void unpin(std::uint32_t slot, std::uint32_t rows = 1) noexcept { pinned_[slot] -= rows; }
    bool is_pinned(std::uint32_t slot) const noexcept { return pinned_[slot] != 0; }

    std::uint32_t num_slots() const noexcept { return static_cast<std::uint32_t>(pinned_.size()); }
    std::uint32_t num_held() const noexcept {
        std::uint32_t held = 0;
        for (const auto& count : held_) held += count.load(std::memory_order_relaxed) != 0;
        return held;
    }

    // Returns the first of these slots that may be written for all envs; -1 if there is none.
    int find_free(std::uint32_t begin, std::uint32_t end) const noexcept {
        for (std::uint32_t slot = begin; slot < end; ++slot) {
            if (!is_held(slot) && !is_pinned(slot)) return static_cast<int>(slot);
        }
        return -1;
    }

   private:
    // A copy of pages of a slot, for a child.
    struct Copy {
        std::byte* place;
        void* memory;
        std::size_t size;
    };

    void before_fork() noexcept override {
        for (std::uint32_t slot = 0; slot < num_slots(); ++slot) {
            if (is_held(slot) && !copy(slot)) hold(slot);  // no memory for a copy: neither process writes to the slot again
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
    std::vector<Copy> copies_;                  // during a fork
};

// Base object of a leased array: while it lives, nothing writes to its slot.
class Lease {
   public:
    Lease(std::shared_ptr<SlotLeases> table, std::uint32_t slot) : table_(std::move(table)), slot_(slot) { table_->hold(slot_); }
    ~Lease() { table_->release(slot_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

   private:
    std::shared_ptr<SlotLeases> table_;
    std::uint32_t slot_;
};

}  // namespace stepmill
