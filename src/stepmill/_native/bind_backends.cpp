// Python bindings of Reaper, KernelLoop, PoolRelay and NodeRelay.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "kernel/kernel_loop.hpp"
#include "relay/relay.hpp"
#include "shared/reaper.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>

namespace stepmill {

namespace {

using namespace nb::literals;

std::uint64_t limit_ns(std::optional<double> limit_s) {
    if (!limit_s) return 0;
    if (!(*limit_s > 0.0)) throw nb::value_error("a time limit must be a positive number of seconds, or None for no limit");
    return to_ns(*limit_s) + 1;
}

std::shared_ptr<Reaper> make_reaper(std::shared_ptr<Slab> slab, std::optional<double> step_timeout_s, std::optional<double> reset_timeout_s, int dump_signal,
                                    std::optional<double> call_timeout_s, std::optional<double> attempts_timeout_s, const std::map<std::uint32_t, int>& pidfds) {
    const Limits limits{limit_ns(step_timeout_s), limit_ns(reset_timeout_s), dump_signal, limit_ns(call_timeout_s), limit_ns(attempts_timeout_s)};
    auto reaper = std::make_shared<Reaper>(std::move(slab), limits);
    for (const auto& [worker, pidfd] : pidfds) reaper->watch(worker, pidfd);
    return reaper;
}

void bind_reaper(nb::module_& module) {
    nb::class_<Reaper>(module, "Reaper", "Watches workers and deadlines in a native thread, and turns deaths and hangs into faults.")
        .def(nb::new_(&make_reaper), "slab"_a, "step_timeout_s"_a.none() = nb::none(), "reset_timeout_s"_a.none() = nb::none(), "dump_signal"_a = 0,
             "call_timeout_s"_a.none() = nb::none(), "attempts_timeout_s"_a.none() = nb::none(), "pidfds"_a = std::map<std::uint32_t, int>(),
             "step_timeout_s, reset_timeout_s, call_timeout_s: limits of one step, reset, call. attempts_timeout_s: limit of a reset with all its attempts. pidfds: the processes to watch, by worker.")
        .def("watch", &Reaper::watch, "worker"_a, "pidfd"_a = Reaper::NO_PIDFD,
            "Watch a new worker: the process behind `pidfd` (duplicated), or a thread if it is -1.")
        .def("forget", &Reaper::forget, "worker"_a, "Stop watching a worker, whose end is expected.")
        .def("declare_dead", &Reaper::declare_dead, "worker"_a, "Treat a worker thread that has ended as a process that died.")
        .def("record_answered", &Reaper::record_answered, "lane"_a, "num_requests"_a, "Record that the first num_requests requests are answered: no deadline includes them.")
        .def("stop", &Reaper::stop, "End the thread; idempotent. No deaths are noticed afterwards.");
}

void bind_kernel(nb::module_& module) {
    module.attr("KERNEL_ABI") = STEPMILL_KERNEL_ABI;
    nb::class_<KernelLoop>(module, "KernelLoop", nb::type_slots(collector_slots<KernelLoop>()), "The envs of a kernel, and the threads that run them.")
        .def(nb::init<std::shared_ptr<Slab>, nb::dict>(), "slab"_a, "settings"_a)
        .def("advance", &KernelLoop::advance, "is_waiting"_a, "Begin new commands and, if is_waiting, run envs or wait for one. Return whether there was anything to do.")
        .def("run_until", &KernelLoop::run_until, "server"_a, "after_ticket"_a, "Finish the command of an env, if its ticket is at most after_ticket.")
        .def("stop", &KernelLoop::stop, "timeout_s"_a, "End the threads. Return False if one is still in an env; it is not joined.")
        .def("last_reported", &KernelLoop::last_reported, nb::sig("def last_reported(self) -> int | None"), "Return the env that was reported last because it did not return within step_timeout_s, or None. For any thread.")
        .def("state_of", &KernelLoop::state_of, "server"_a, nb::sig("def state_of(self, server: int) -> typing.Any"), "Return a view of the bytes of an env's state.")
        .def("set_outside", &KernelLoop::set_outside, "outside"_a, nb::sig("def set_outside(self, outside: list[typing.Any]) -> None"), "Set for each env the KernelEnvMemory that is saved and restored with its state, or None.")
        .def("release", &KernelLoop::release, "Drop all references to Python objects.");
}

void bind_relay(nb::module_& module) {
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

}  // namespace

void bind_backends(nb::module_& module) {
    bind_reaper(module);
    bind_kernel(module);
    bind_relay(module);
}

}  // namespace stepmill
