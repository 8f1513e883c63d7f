// The learner's words of the slab: the command of each server with its arguments, and how its worker is woken.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "codec/blobs.hpp"
#include "codec/codec.hpp"
#include "shared/slab.hpp"
#include "worker/loop.hpp"

namespace stepmill {

// Numbers the commands of each server and publishes their tickets: at once, or when the successor of a dead worker serves.
// Used by the pool's thread with the GIL. The thread of a restart calls rewrite_control_words(), also with the GIL.
class CommandWriter {
   public:
    CommandWriter(Slab& slab, PyObject* pickler);

    void attach_loop(nb::object loop);      // serial backend: the calling thread runs the commands
    void attach_outbox(int eventfd);  // a duplicate of it is written after each delivery
    void attach_advance(nb::object advance);  // advance(is_waiting) -> bool: starts new commands and, if is_waiting, fetches results
    Loop* loop() const noexcept { return loop_; }
    const nb::object& advance() const noexcept { return advance_; }
    bool has_workers() const noexcept { return loop_ == nullptr && !advance_; }

    const std::uint32_t& ticket(std::uint32_t server) const { return tickets_[server].newest; }  // of the newest command; the reference stays valid
    std::uint32_t published(std::uint32_t server) const { return tickets_[server].newest - tickets_[server].num_reserved; }
    bool is_done(std::uint32_t server) const { return done(server).load(std::memory_order_acquire) == ticket(server); }
    bool is_published_done(std::uint32_t server) const { return done(server).load(std::memory_order_acquire) == published(server); }

    void write(ServerLocation location, std::uint32_t row, Command command, std::uint32_t slot) const {
        const ServerWords& words = slab_.words[location.worker];
        put(words.row[location.local], row);
        set_command(words, location.local, command);
        put(words.slot[location.local], static_cast<std::uint8_t>(slot));
    }
    const std::vector<std::uint8_t>& encode(PyObject* blob);  // valid until the next call
    void write_blob(std::uint32_t server, std::span<const std::uint8_t> blob);
    void write_blob(std::uint32_t server, const nb::object& blob) {  // bytes
        write_blob(server, {reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(blob.ptr())), static_cast<std::size_t>(PyBytes_GET_SIZE(blob.ptr()))});
    }
    void repeat_blob(std::uint32_t server, std::span<const std::uint8_t> blob);  // the same without an exception: if it fails, the worker finds no blob, and its env has a fault

    // Adds one command of several. deliver() then wakes their workers.
    void add(std::uint32_t server, ServerLocation location) {
        has_new_commands_[location.worker] = 1;
        publish(location, ++tickets_[server].newest);
    }
    void deliver();
    void issue(std::uint32_t server);           // issues a single command
    void reserve_ticket(std::uint32_t server);     // reserves a ticket for a command that is issued later
    void issue_reserved(std::uint32_t server);
    void run_outstanding(std::uint32_t server) {  // serial backend: runs the command issued before, if it is outstanding
        if (loop_ != nullptr) loop_->run_server(slab_.server_locations[server].local);
    }

    bool is_restarting(std::uint32_t worker) const { return is_restarting_.at(worker) != 0; }
    bool is_any_restarting() const noexcept { return num_restarting_ != 0; }
    bool is_from_before_restart(std::uint32_t server) const {  // whether the newest command was given before the worker's restart began
        return is_restarting(slab_.server_locations[server].worker) && ticket(server) == tickets_[server].at_restart;
    }
    void begin_restart(std::uint32_t worker);  // from here on commands wait for the successor
    void end_restart(std::uint32_t worker);    // the successor serves, or the restart was cancelled
    void rewrite_control_words(std::uint32_t worker, bool is_closed);
    bool abort_outstanding(std::uint32_t server);
    void check_deaths_of(std::uint32_t worker);
    void post_request(std::uint32_t worker);

    void clear();
    int traverse(visitproc visit, void* arg) const;

   private:
    struct Tickets {
        std::uint32_t newest = 0;
        std::uint32_t num_reserved = 0;  // how many of the newest tickets are not published yet
        std::uint32_t at_restart = 0;    // the newest published ticket when the restart of the worker began
    };
    const Word& done(std::uint32_t server) const { return slab_.words[slab_.server_locations[server].worker].done[slab_.server_locations[server].local]; }
    void publish(ServerLocation location, std::uint32_t ticket) const {
        if (!is_restarting_[location.worker]) slab_.words[location.worker].ticket[location.local].store(ticket, std::memory_order_release);
    }
    void ring(std::uint32_t worker);
    void notify_outbox() const;

    Slab& slab_;
    std::vector<Tickets> tickets_;             // by server
    std::uint32_t num_restarting_ = 0;
    std::vector<std::uint8_t> is_restarting_;  // by worker
    std::vector<std::uint8_t> has_new_commands_;  // by worker: deliver() must wake it
    std::vector<std::uint32_t> num_posted_;    // by worker: the number of requests posted to it
    BlobWriter blobs_;
    std::vector<std::uint8_t> buffer_;
    Encoder encoder_;
    std::optional<OwnedFd> outbox_;
    Loop* loop_ = nullptr;
    nb::object loop_object_, advance_;
};

}  // namespace stepmill
