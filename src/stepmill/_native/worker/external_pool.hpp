// A proxy's side of the slab: its envs belong to the pool of another library, for example EnvPool.
//
// receive_commands()  commands of many servers at once, as arrays
// publish()           rows of the pool's results, in any order
//
// Control words, arguments of resets, flags, infos and faults are those of every loop. Autoreset: NEXT_STEP leaves the reset to the
// external pool, SAME_STEP asks it for a reset, DISABLED waits for the learner. The external pool chooses the seeds of automatic resets.
#pragma once

#include <memory>
#include <vector>

#include "worker/loop.hpp"

namespace stepmill {

// Called by one thread, the proxy's own, with the GIL; receive_commands() releases the GIL while it waits. The learner writes commands
// with the GIL, so receive_commands() sees all commands of one send, or none.
class ExternalPoolLoop : public Loop {
   public:
    ExternalPoolLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings);

    nb::tuple receive_commands(bool may_wait);
    nb::tuple receive_command(std::uint32_t local, std::uint32_t after_ticket);
    nb::list publish(nb::handle servers, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle infos);
    void fail(nb::handle servers, nb::handle error, const char* phase);
    std::uint32_t num_outstanding() const { return num_outstanding_; }
    std::vector<std::uint32_t> outstanding() const;

   private:
    using Servers = std::vector<std::uint32_t>;
    // The newest command of a server.
    struct Command {
        bool is_outstanding = false;  // received and not published
        bool is_reset = false;
        bool awaits_reset = false;  // SAME_STEP: the episode ended, and the result waits for the reset
        Result held;                // that result
    };
    struct Rows;  // the arguments of one publish(), as arrays with one row per server

    nb::tuple no_commands(LoopExit exit) const;
    void begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets);
    nb::tuple commands(const Servers& steps, nb::list resets);
    nb::object actions_of(const Servers& steps) const;
    Servers parse_servers(nb::handle servers) const;
    void read_rows(Rows& rows, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated) const;
    bool needs_reset_first(std::uint32_t local, const Rows& rows, std::size_t row);
    void hold_for_reset(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos);
    void publish_rows(const Rows& rows, std::vector<std::size_t>& places, nb::handle infos);
    void write_rows(const Rows& rows, const std::vector<std::size_t>& places);
    bool write_row(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos, Result& result);
    void count_command(std::uint32_t local);
    void end_command(std::uint32_t local);
    void report_progress();

    std::vector<Command> commands_;
    std::uint32_t num_outstanding_ = 0;
    std::uint64_t busy_since_ns_ = 0;  // when the first command became outstanding
};

}  // namespace stepmill
