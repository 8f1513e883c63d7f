// Python bindings of Reaper (reaper.hpp).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <optional>

#include "bindings.hpp"
#include "reaper.hpp"

namespace nb = nanobind;

namespace stepmill {

namespace {

constexpr double NANOSECONDS = 1e9;
constexpr double MAX_LIMIT_S = 1e9;

std::uint64_t to_ns(std::optional<double> limit_s) {
    if (!limit_s) return 0;
    if (!(*limit_s > 0.0)) throw nb::value_error("a time limit must be a positive number of seconds, or None for no limit");
    return static_cast<std::uint64_t>(std::min(*limit_s, MAX_LIMIT_S) * NANOSECONDS) + 1;
}

std::shared_ptr<Reaper> make_reaper(std::shared_ptr<Slab> slab, std::optional<double> step_timeout_s, std::optional<double> reset_timeout_s, int dump_signal,
                                    std::optional<double> call_timeout_s, std::optional<double> attempts_timeout_s) {
    const Limits limits{to_ns(step_timeout_s), to_ns(reset_timeout_s), dump_signal, to_ns(call_timeout_s), to_ns(attempts_timeout_s)};
    return std::make_shared<Reaper>(std::move(slab), limits);
}

}  // namespace

void bind_reaper(nb::module_& module) {
    nb::class_<Reaper>(module, "Reaper", "Watches workers and deadlines in a native thread, and turns deaths and hangs into faults.")
        .def(nb::new_(&make_reaper), nb::arg("slab"), nb::arg("step_timeout_s").none() = nb::none(), nb::arg("reset_timeout_s").none() = nb::none(), nb::arg("dump_signal") = 0,
             nb::arg("call_timeout_s").none() = nb::none(), nb::arg("attempts_timeout_s").none() = nb::none(),
             "step_timeout_s, reset_timeout_s, call_timeout_s: limits of one step, reset, call. attempts_timeout_s: limit of a reset with all its attempts.")
        .def("watch", &Reaper::watch, nb::arg("worker"), nb::arg("pidfd") = Reaper::NO_PIDFD,
            "Watch a new worker: the process behind `pidfd` (duplicated), or a thread if it is -1.")
        .def("forget", &Reaper::forget, nb::arg("worker"), "Stop watching a worker, whose end is expected.")
        .def("declare_dead", &Reaper::declare_dead, nb::arg("worker"), "Treat a worker thread that has ended as a process that died.")
        .def("num_requests", &Reaper::num_requests, nb::arg("worker"), "Return how many slow requests were ever posted to a worker and its predecessors.")
        .def("record_answered", &Reaper::record_answered, nb::arg("worker"), nb::arg("num_requests"), "Record that the first num_requests requests are answered: no deadline includes them.")
        .def("stop", &Reaper::stop, "End the thread; idempotent. No deaths are noticed afterwards.");
}

}  // namespace stepmill
