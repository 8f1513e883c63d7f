// Python bindings of PoolRelay and NodeRelay (relay.hpp).
#define NO_IMPORT_ARRAY
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "relay.hpp"

namespace stepmill {

void bind_relay(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PoolRelay>(module, "PoolRelay", "The pool's side of the messages to one node, whose workers serve another slab.")
        .def(nb::init<std::shared_ptr<Slab>, std::vector<std::uint32_t>>(), "slab"_a, "workers"_a, "workers: those of the node, by their numbers in the pool.")
        .def("collect_commands", &PoolRelay::collect_commands, nb::sig("def collect_commands(self) -> Any | None"), "Return the new commands as a message, a uint8 array, or None.")
        .def("publish_results", &PoolRelay::publish_results, nb::sig("def publish_results(self, message: Any) -> tuple[list[int], int]"), "message"_a,
             "Write the results of a message to the pool's slab. Return the workers that are dead, and how many results there were.")
        .def("has_outstanding", &PoolRelay::has_outstanding, "Return whether a collected command has no result.")
        .def("tickets_of", &PoolRelay::tickets_of, "worker"_a, "Return the newest ticket of each server of a worker.")
        .def("is_published", &PoolRelay::is_published, "worker"_a, "local"_a, "ticket"_a, "Return whether the result of a command, or of a later one of its server, is in the pool's slab.")
        .def("mark_serving", &PoolRelay::mark_serving, "worker"_a, "Record that a worker, whose node is lost, may have begun a slow request.")
        .def("expect_worker", &PoolRelay::expect_worker, "worker"_a, "generation"_a, "A successor serves: messages of its predecessors say nothing about it, and its counters begin again.");
    nb::class_<NodeRelay>(module, "NodeRelay", "A node's side of the messages: it writes commands to the node's slab and reads results.")
        .def(nb::init<std::shared_ptr<Slab>>(), "slab"_a)
        .def("apply_commands", &NodeRelay::apply_commands, nb::sig("def apply_commands(self, message: Any) -> int"), "message"_a, "Give the commands of a message to the workers, except those that came before. Return how many are new.")
        .def("wait", &NodeRelay::wait, "is_for_all"_a, "timeout_s"_a, "Wait until all commands are done, or one, or a worker has died. Return False after the timeout or wake(). One thread at a time.")
        .def("wake", &NodeRelay::wake, "End the wait of another thread, or the next one.")
        .def("collect_results", &NodeRelay::collect_results, nb::sig("def collect_results(self) -> Any"), "Return the results that were not collected before as a message, a uint8 array.")
        .def("num_outstanding", &NodeRelay::num_outstanding, "Return how many commands have a result that was not collected, or none yet.")
        .def("ticket_after", &NodeRelay::ticket_after, nb::sig("def ticket_after(self, worker: int, local: int, pool_ticket: int) -> int | None"), "worker"_a, "local"_a, "pool_ticket"_a,
             "Return the number that a command has in the node's slab, or None if it has not arrived.")
        .def("post_request", &NodeRelay::post_request, "worker"_a, "Count a slow request for a worker, and ring its doorbell.")
        .def("set_tickets", &NodeRelay::set_tickets, "worker"_a, "pool_tickets"_a, "Set the pool's newest tickets of a worker's servers, whose commands are done or lost.")
        .def("clear_worker", &NodeRelay::clear_worker, "worker"_a, "Drop the commands of a worker that is gone, and rewrite its words for its successor.")
        .def("begin_generation", &NodeRelay::begin_generation, "worker"_a, "A successor serves.")
        .def("generation", &NodeRelay::generation, "worker"_a, "Return how often a worker was restarted.")
        .def("stop", &NodeRelay::stop, "Tell all workers to end, and wake the thread that waits.");
}

}  // namespace stepmill
