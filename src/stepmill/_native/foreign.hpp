// A proxy's side of the slab: the envs are those of a pool that is not ours (EnvPool, and whatever takes and gives arrays).
//
//   take()     commands of many servers at once, as arrays
//   publish()  rows of the pool's results, in whatever order they come
//
// The words in the slab are those of every worker (protocol.hpp), and so is what an episode's end means: NEXT_STEP leaves
// the reset to the pool, SAME_STEP asks for it, DISABLED waits for the learner. Seeds of automatic resets are the pool's own.
#pragma once

#include <memory>
#include <vector>

#include "codec.hpp"
#include "loop.hpp"
#include "overflow.hpp"
#include "tree.hpp"

namespace stepmill {

constexpr int FOREIGN_COMMANDS = 2;  // beside LoopExit's two: commands were taken, or none are there

// What the proxy remembers of one server.
struct ForeignSeat {
    std::uint32_t taken = 0;     // ticket of the command last taken
    bool is_flying = false;      // taken, and not published
    bool is_reset = false;       // what flies is a reset
    bool needs_reset = false;    // NEXT_STEP: its last step ended an episode
    bool is_held = false;        // SAME_STEP: its episode ended, and the reset that the result waits for flies
    double held_reward = 0.0;
    bool held_terminated = false, held_truncated = false;
    std::vector<std::byte> held_obs;
    nb::object held_info;
    double episode_return = 0.0;
    std::int64_t episode_length = 0;
};

// Called by one thread, the proxy's own, with the GIL; take() lets go of it while it waits. The learner writes commands
// with the GIL, so that a take() sees all commands of one of its calls, or none.
class ForeignLoop {
   public:
    ForeignLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings);

    nb::tuple take(bool may_wait);
    nb::tuple take_one(std::uint32_t local, std::uint32_t after_ticket);
    nb::list publish(nb::handle servers, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle infos);
    void fail(nb::handle servers, nb::handle error, const char* phase);
    std::uint32_t num_flying() const { return num_flying_; }
    nb::list flying() const;
    void requests_seen(std::uint32_t count);
    void release();
    int traverse(visitproc visit, void* arg) const;

   private:
    using Servers = std::vector<std::uint32_t>;
    struct Rows;  // one publish(): arrays of as many rows as servers

    nb::tuple nothing(int exit) const;
    void begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets);
    nb::tuple commands(const Servers& steps, nb::list resets);
    nb::object reset_order(std::uint32_t local);
    nb::object actions_of(const Servers& steps) const;
    Servers parse_servers(nb::handle servers) const;
    void read_rows(Rows& rows, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated) const;
    bool is_due_again(std::uint32_t local, const Rows& rows, std::size_t row);
    void hold(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos);
    void land_rows(const Rows& rows, std::vector<std::size_t>& places, nb::handle infos);
    void write_rows(const Rows& rows, const std::vector<std::size_t>& places);
    void write_flags(std::uint32_t local, const Rows& rows, std::size_t row);
    void write_final(std::uint32_t local);
    void write_fault(std::uint32_t local, nb::handle error, const char* phase);
    void store_payload(std::uint32_t local);
    void write_info(std::uint32_t local, nb::handle infos, std::size_t row, std::size_t num_rows);
    void add_command(std::uint32_t local);
    void land(std::uint32_t local);
    void finish(std::uint32_t local);
    void flush();
    void report_progress();
    void wait(std::uint32_t seen);

    std::shared_ptr<Slab> slab_;
    std::uint32_t worker_;
    WorkerControl* control_;
    ServerWords words_;
    PoolControl* pool_;
    Autoreset autoreset_;
    std::vector<ForeignSeat> seats_;
    Tree obs_, action_;
    std::vector<Column> final_columns_;
    nb::object describe_, unpickler_;
    Encoder encoder_;
    OverflowWriter overflow_;
    std::vector<std::uint8_t> buffer_;
    std::uint32_t num_flying_ = 0;
    std::uint32_t requests_seen_ = 0;
    std::uint32_t group_ = 0;  // results stored but not counted yet
    Patience patience_;
    std::uint64_t busy_since_ns_ = 0;  // when something began to fly while nothing did
};

}  // namespace stepmill
