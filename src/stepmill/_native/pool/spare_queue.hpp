// Spares: more env objects than envs. Which server serves which env, and which episodes begin before a command asks for them.
//
//     env 3 is served by server 3, ends ─► queue [8, 9] becomes [9, 3]; server 8 serves env 3, server 3 is reset
//
// A staged reset is a normal command, but its result goes to the server's staging row. When a command of the env asks for it
// (use_staged), it is copied to the env's row before it is received (copy_staged). The queue changes only when results are received, in
// that order: so the assignment depends on the user's calls and on what the envs return, never on the speed of the
// workers.
#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "pool/command_writer.hpp"

namespace stepmill {

constexpr std::uint32_t NO_ENV = UINT32_MAX;

// The seed of a reset, if it has one.
struct ResetSeed {
    bool has_seed = false;
    std::uint64_t seed = 0;
};

// Owns the record of each server: its env, its staged episode and the seed of that. Servers without an env wait in the queue.
// Used by the pool's thread, with the GIL.
class SpareQueue {
   public:
    SpareQueue(Slab& slab, CommandWriter& commands, std::uint32_t num_envs, Seeding seeding);

    bool has_spares() const noexcept { return num_spares_ != 0; }
    std::uint32_t queued_server(std::uint32_t place) const { return queue_.at(place); }          // 0: the next one
    std::uint32_t env_of(std::uint32_t server) const { return records_.at(server).env; }  // NO_ENV: it waits in the queue
    std::vector<std::uint32_t> envs_of(std::uint32_t worker) const;

    std::uint32_t swap_in(std::uint32_t finished);  // its episode has ended and was received; returns the server that serves the env from now on
    void reset_server_order();                      // every env is served by the server of its number
    void stage_all(nb::handle seeds);               // resets all spares; one seed or None per spare

    bool is_staged(std::uint32_t server) const { return records_[server].is_staged; }
    ResetSeed use_staged(std::uint32_t server);           // a command of its env asks for the staged episode, which is ready or outstanding
    void copy_staged(std::uint32_t server, std::uint32_t row, std::uint32_t slot);  // copies the first observation to the env's row
    void discard_staged(std::uint32_t server) { records_[server].is_staged = false; }

    void write_next_seed(std::uint32_t server);     // to the words of a reset that replaces the staged one, or that restores a lost env
    void record_explicit_reset(std::uint32_t server, bool is_new_count, bool is_drawn);
    void stage_again(std::uint32_t server);         // the staged episode was lost with its object: the successor begins it again
    void mark_rebuilt(std::uint32_t lane);          // its env objects are gone, and there is no successor yet
    bool has_deferred() const noexcept { return has_deferred_; }
    void flush_deferred_resets(const std::function<bool(std::uint32_t env_id)>& is_idle);

    nb::dict positions() const;              // all that restore() needs
    void restore(const nb::dict& saved);     // throws std::exception, and changes nothing, if it does not fit
    std::uint32_t server_of(std::uint32_t env) const;

    std::uint64_t num_begun(std::uint32_t server) const { return records_[server].num_begun; }
    void count_begun(std::uint32_t server) { ++records_[server].num_begun; }

   private:
    struct Record {
        std::uint32_t env = NO_ENV;
        bool is_staged = false;        // its next episode was begun; the first observation goes to its staging row
        bool is_rebuilt = false;       // the object of the staged episode is gone
        bool is_drawn = false;         // the seed of its next episode is drawn
        bool has_own_seed = false;
        ResetSeed next;                // of its next episode
        std::uint64_t own_seed = 0;    // of its last explicit reset
        std::uint64_t num_begun = 0;   // resets that it was commanded
        std::deque<ResetSeed> deferred;  // resets that wait for a running one; their tickets are reserved
    };
    bool is_gone(std::uint32_t server) const;
    void draw_seed(std::uint32_t server);
    void write_seed(ServerLocation location, ResetSeed seed) const;
    void stage(std::uint32_t server);
    void publish_stage(std::uint32_t server, ResetSeed seed);

    Slab& slab_;
    CommandWriter& commands_;
    std::uint32_t num_envs_, num_spares_;
    Seeding seeding_;
    std::vector<Record> records_;      // by server
    std::deque<std::uint32_t> queue_;  // the next one in front
    bool has_deferred_ = false;        // a server has deferred resets, or is rebuilt
    bool has_pool_seed_ = false;
    std::uint64_t pool_seed_ = 0, num_drawn_ = 0;  // of the last reset of all envs; seeds drawn since
};

}  // namespace stepmill
