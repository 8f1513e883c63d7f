// Which result slots are in use: by arrays that the user holds, and by envs whose newest result lies there or will.
// Counts are private to the process. Knows no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "slab.hpp"

namespace stepmill {

// Shared by the ledger and every lease. A lease may be dropped in any thread, after the pool was closed too.
class SlotBook {
   public:
    SlotBook(std::shared_ptr<SlabMemory> memory, std::uint32_t num_slots) : memory_(std::move(memory)), held_(num_slots), pinned_(num_slots) {}

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
    std::shared_ptr<SlabMemory> memory_;  // arrays of a lease outlive the pool
    std::vector<std::atomic<std::uint32_t>> held_;
    std::vector<std::uint32_t> pinned_;
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
