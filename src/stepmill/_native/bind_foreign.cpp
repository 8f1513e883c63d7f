// Python's view of ForeignLoop.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "foreign.hpp"

#include <nanobind/stl/shared_ptr.h>

namespace stepmill {

namespace {

int traverse_loop(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nanobind::inst_ready(self) ? nanobind::inst_ptr<ForeignLoop>(self)->traverse(visit, arg) : 0;
}

int clear_loop(PyObject* self) {
    nanobind::inst_ptr<ForeignLoop>(self)->release();
    return 0;
}

PyType_Slot collector_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_loop)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_loop)},
    {0, nullptr},
};

}  // namespace

void bind_foreign(nb::module_& module) {
    using namespace nb::literals;
    module.attr("FOREIGN_COMMANDS") = FOREIGN_COMMANDS;
    nb::class_<ForeignLoop>(module, "ForeignLoop", nb::type_slots(collector_slots), "A proxy's side of the slab, for a pool of envs that is not ours.")
        .def(nb::init<std::shared_ptr<Slab>, std::uint32_t, nb::dict>(), "slab"_a, "worker"_a, "settings"_a)
        .def("take", &ForeignLoop::take, "may_wait"_a, nb::sig("def take(self, may_wait: bool) -> tuple[int, typing.Any, typing.Any, list[tuple[int, typing.Any, typing.Any]] | None]"),
             "Take what was commanded: (exit, servers, actions, resets); waits for it without the GIL.")
        .def("take_one", &ForeignLoop::take_one, "server"_a, "after_ticket"_a, nb::sig("def take_one(self, server: int, after_ticket: int) -> tuple[int, typing.Any, typing.Any, list[tuple[int, typing.Any, typing.Any]] | None]"),
             "The same for one server, if its ticket is at most after_ticket.")
        .def("publish", &ForeignLoop::publish, "servers"_a, "obs"_a, "reward"_a.none(), "terminated"_a.none(), "truncated"_a.none(), "infos"_a.none(),
             nb::sig("def publish(self, servers: object, obs: object, reward: object | None, terminated: object | None, truncated: object | None, infos: object | None) -> list[int]"),
             "Write results, row j of servers[j]; returns the servers that are to be reset first (SAME_STEP).")
        .def("fail", &ForeignLoop::fail, "servers"_a, "error"_a, "phase"_a, "Make an exception the fault of these servers, as far as they fly.")
        .def("flying", &ForeignLoop::flying, nb::sig("def flying(self) -> list[int]"), "Servers whose command was taken and has no result yet.")
        .def("num_flying", &ForeignLoop::num_flying, "How many there are of them.")
        .def("requests_seen", &ForeignLoop::requests_seen, "count"_a, "Say how many slow requests were handled so far.")
        .def("release", &ForeignLoop::release, "Drop every reference to Python objects.");
}

}  // namespace stepmill
