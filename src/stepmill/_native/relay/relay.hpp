// Commands and results of a node as messages: the workers of a node serve a slab on their own machine, and the pool has another slab.
//
//   pool's slab ──collect_commands──► message ──apply_commands──► node's slab ──► workers
//   pool's slab ◄──publish_results── message ◄──collect_results── node's slab ◄── workers
//
// A message is one array of bytes: a header, then columns, each with one row per server. For the pool's slab, PoolRelay is the owner of
// the commands of all workers of the node: it starts and claims them as a worker does, so a result that comes after its command was
// aborted changes nothing. Servers are numbered within the node, in the order of its workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "shared/numpy_api.hpp"

#include <nanobind/nanobind.h>

#include "codec/blobs.hpp"
#include "codec/payload_writer.hpp"
#include "shared/slab.hpp"

namespace stepmill {

namespace nb = nanobind;

// One worker in a message of results.
struct RelayedWorker {
    CounterValues counters;
    std::uint64_t num_ended, resident_bytes;
    std::uint32_t generation;  // how often the node has restarted it
    std::uint32_t dead;        // a Death
    std::uint32_t current;     // the server (within the worker) whose command it runs or ran last, or NO_SERVER
    std::uint32_t running;     // the Activity there
    std::uint32_t serving;     // 1: it runs a slow request, or died in one
    std::uint32_t unused;
};

// The pool's side of one node. Used by one thread, with the GIL.
class PoolRelay {
   public:
    PoolRelay(std::shared_ptr<Slab> slab, std::vector<std::uint32_t> workers);

    nb::object collect_commands();                  // the new commands as a message, or None
    nb::tuple publish_results(nb::handle message);   // (workers found dead, number of results)
    bool has_outstanding() const;                    // whether a collected command has no result
    void expect_worker(std::uint32_t worker, std::uint32_t generation);  // a successor serves: its counters begin again
    std::vector<std::uint32_t> tickets_of(std::uint32_t worker) const;   // the newest ticket of each of its servers
    bool is_published(std::uint32_t worker, std::uint32_t local, std::uint32_t ticket) const;  // the result of a command, or of a later one
    void mark_serving(std::uint32_t worker);  // its node is lost, and it may have begun a slow request

   private:
    struct Server {
        std::uint32_t server;     // number in the pool
        std::uint32_t collected;  // ticket of the newest command that was collected
    };
    struct Worker {
        std::uint32_t worker;
        std::uint32_t generation;
        CounterValues before;  // counters of its predecessors
    };
    void publish_row(const struct ResultColumns& columns, std::size_t row, std::size_t final_row, const std::uint8_t* payload);
    void update_worker(Worker& worker, const RelayedWorker& report, nb::list& dead);

    std::shared_ptr<Slab> slab_;
    std::vector<Worker> workers_;
    std::vector<Server> servers_;
    std::vector<PayloadWriter> payloads_;  // by worker of the node
    std::vector<std::uint32_t> worker_of_;  // by server of the node: index in workers_
    std::vector<std::uint8_t> buffer_;
};

// The node's side. Used by any thread with the GIL, except that one thread at a time may call wait(), which releases the GIL.
class NodeRelay {
   public:
    explicit NodeRelay(std::shared_ptr<Slab> slab);

    std::uint32_t apply_commands(nb::handle message);  // returns how many commands are new
    bool wait(bool is_for_all, double timeout_s);       // until all commands are done, or one
    void wake();                                        // ends a wait
    nb::object collect_results();                       // results that were not collected before, as a message
    std::uint32_t num_outstanding() const;
    // The node's ticket after which a request must run, or None if its command has not arrived.
    nb::object ticket_after(std::uint32_t worker, std::uint32_t local, std::uint32_t pool_ticket) const;
    void post_request(std::uint32_t worker);
    void set_tickets(std::uint32_t worker, const std::vector<std::uint32_t>& pool_tickets);  // of commands that are done or lost
    void clear_worker(std::uint32_t worker);            // rewrites the words of a worker that is gone, for its successor
    void begin_generation(std::uint32_t worker);        // the successor serves
    std::uint32_t generation(std::uint32_t worker) const { return generations_.at(worker); }
    void stop();                                        // tells all workers to end

   private:
    struct Server {
        ServerLocation location;
        std::uint32_t server;
        std::uint32_t pool_ticket = 0;  // of the newest command, as the pool numbers them
        std::uint32_t ticket = 0;       // the same command in the node's slab
        bool is_outstanding = false;    // its result has not been collected
    };
    bool is_done(const Server& server) const;

    std::shared_ptr<Slab> slab_;
    std::vector<Server> servers_;
    std::vector<std::uint32_t> first_server_;  // by worker
    BlobWriter blobs_;
    std::vector<std::uint32_t> num_posted_, generations_;
    std::vector<std::uint8_t> is_death_collected_;
    std::vector<std::uint8_t> buffer_;
    std::atomic<bool> is_woken_{false};
};

}  // namespace stepmill
