// The class Reaper for Python. What it does, reaper.hpp says.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <optional>
#include <system_error>

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

// Runs `action`; what the system refuses becomes an OSError.
template <typename Action>
auto with_os_errors(Action action) {
    try {
        return action();
    } catch (const std::system_error& refusal) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(refusal.code().value(), refusal.what()).ptr());
        throw nb::python_error();
    }
}

std::shared_ptr<Reaper> make_reaper(std::shared_ptr<Slab> slab, std::optional<double> step_timeout_s, std::optional<double> reset_timeout_s, int dump_signal,
                                    std::optional<double> call_timeout_s, std::optional<double> attempts_timeout_s) {
    const Limits limits{to_ns(step_timeout_s), to_ns(reset_timeout_s), dump_signal, to_ns(call_timeout_s), to_ns(attempts_timeout_s)};
    return with_os_errors([&] { return std::make_shared<Reaper>(std::move(slab), limits); });
}

void check_worker(const Reaper& reaper, std::uint32_t worker) {
    if (worker < reaper.num_workers()) return;
    throw nb::index_error("there is no such worker; workers count from 0");
}

}  // namespace

void bind_reaper(nb::module_& module) {
    nb::class_<Reaper>(module, "Reaper", "Watches workers and deadlines in a native thread; makes faults of deaths and hangs.")
        .def(nb::new_(&make_reaper), nb::arg("slab"), nb::arg("step_timeout_s").none() = nb::none(), nb::arg("reset_timeout_s").none() = nb::none(), nb::arg("dump_signal") = 0,
             nb::arg("call_timeout_s").none() = nb::none(), nb::arg("attempts_timeout_s").none() = nb::none(),
             "step_timeout_s, reset_timeout_s, call_timeout_s: of one step, reset, call. attempts_timeout_s: of a reset with all its attempts.")
        .def(
            "watch",
            [](Reaper& reaper, std::uint32_t worker, int pidfd) {
                check_worker(reaper, worker);
                with_os_errors([&] { reaper.watch(worker, pidfd); });
            },
            nb::arg("worker"), nb::arg("pidfd") = Reaper::NO_PIDFD,
            "Watch a worker that lives from now on: the process behind `pidfd` (duplicated), or a thread if it is -1.")
        .def(
            "forget",
            [](Reaper& reaper, std::uint32_t worker) {
                check_worker(reaper, worker);
                reaper.forget(worker);
            },
            nb::arg("worker"), "Watch a worker no longer: its end is expected.")
        .def(
            "declare_dead",
            [](Reaper& reaper, std::uint32_t worker) {
                check_worker(reaper, worker);
                reaper.declare_dead(worker);
            },
            nb::arg("worker"), "Treat a worker thread that has ended like a process that died.")
        .def("stop", &Reaper::stop, "End the thread; idempotent. Deaths go unnoticed from then on.");
}

}  // namespace stepmill
