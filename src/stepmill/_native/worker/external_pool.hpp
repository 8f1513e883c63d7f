// A proxy's side of the slab: its envs belong to the pool of another library, for example EnvPool.
//
// receive_commands()  commands of many servers at once, as arrays
// publish()           rows of the pool's results, in any order
//
// The control words are those of every worker (protocol.hpp). Autoreset: NEXT_STEP leaves the reset to the external pool, SAME_STEP asks
// it for a reset, DISABLED waits for the learner. The external pool chooses the seeds of automatic resets.
#pragma once

#include <memory>
#include <vector>

#include "codec/codec.hpp"
#include "codec/payload_writer.hpp"
#include "shared/tree.hpp"
#include "worker/loop.hpp"

namespace stepmill {

constexpr int EXTERNAL_COMMANDS = 2;  // besides those of LoopExit: the tuple has the new commands, possibly none

// What the proxy remembers of one server.
struct ExternalEnv {
    std::uint32_t ticket = 0;     // of the newest command received
    bool is_outstanding = false;  // received and not published
    bool is_reset = false;       // the outstanding command is a reset
    bool needs_reset = false;    // NEXT_STEP: the last step ended an episode
    bool awaits_reset = false;   // SAME_STEP: the episode ended, and the result waits for the reset
    double final_reward = 0.0;
    bool final_terminated = false, final_truncated = false;
    std::vector<std::byte> final_obs;
    std::vector<std::uint8_t> final_info;  // encoded: the reset may change the arrays
    double episode_return = 0.0;
    std::int64_t episode_length = 0;
};

// Called by one thread, the proxy's own, with the GIL; receive_commands() releases the GIL while it waits. The learner writes commands
// with the GIL, so receive_commands() sees all commands of one send, or none.
class ExternalPoolLoop {
   public:
    ExternalPoolLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings);

    nb::tuple receive_commands(bool may_wait);
    nb::tuple receive_command(std::uint32_t local, std::uint32_t after_ticket);
    nb::list publish(nb::handle servers, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle infos);
    void fail(nb::handle servers, nb::handle error, const char* phase);
    std::uint32_t num_outstanding() const { return num_outstanding_; }
    std::vector<std::uint32_t> outstanding() const;
    void requests_seen(std::uint32_t count);
    void release();
    int traverse(visitproc visit, void* arg) const;

   private:
    using Servers = std::vector<std::uint32_t>;
    struct Rows;  // the arguments of one publish(), as arrays with one row per server

    nb::tuple no_commands(int exit) const;
    void begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets);
    nb::tuple commands(const Servers& steps, nb::list resets);
    nb::object reset_arguments(std::uint32_t local);
    nb::object actions_of(const Servers& steps) const;
    Servers parse_servers(nb::handle servers) const;
    void read_rows(Rows& rows, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated) const;
    bool needs_reset_first(std::uint32_t local, const Rows& rows, std::size_t row);
    void hold_for_reset(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos);
    void publish_rows(const Rows& rows, std::vector<std::size_t>& places, nb::handle infos);
    void write_rows(const Rows& rows, const std::vector<std::size_t>& places);
    void write_flags(std::uint32_t local, const Rows& rows, std::size_t row);
    void write_final(std::uint32_t local);
    void write_fault(std::uint32_t local, nb::handle error, const char* phase);
    void write_info(std::uint32_t local, nb::handle infos, std::size_t row, std::size_t num_rows);
    void count_command(std::uint32_t local);
    void end_command(std::uint32_t local);
    void finish(std::uint32_t local);
    void flush();
    void report_progress();

    std::shared_ptr<Slab> slab_;
    std::uint32_t worker_;
    WorkerControl* control_;
    ServerWords words_;
    PoolControl* pool_;
    Autoreset autoreset_;
    std::vector<ExternalEnv> envs_;
    Tree obs_, action_;
    std::vector<Column> final_columns_;
    nb::object describe_, unpickler_;
    Encoder encoder_;
    PayloadWriter payloads_;
    std::vector<std::uint8_t> buffer_;
    std::uint32_t num_outstanding_ = 0;
    std::uint32_t requests_seen_ = 0;
    std::uint32_t group_ = 0;  // results stored but not counted yet
    SpinPolicy spin_policy_;
    std::uint64_t busy_since_ns_ = 0;  // when the first command became outstanding
};

}  // namespace stepmill
