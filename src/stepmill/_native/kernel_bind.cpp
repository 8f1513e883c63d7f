// Python's view of KernelLoop.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "kernel_loop.hpp"

#include <nanobind/stl/shared_ptr.h>

namespace stepmill {

namespace {

int traverse_loop(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nanobind::inst_ready(self) ? nanobind::inst_ptr<KernelLoop>(self)->traverse(visit, arg) : 0;
}

int clear_loop(PyObject* self) {
    nanobind::inst_ptr<KernelLoop>(self)->release();
    return 0;
}

PyType_Slot collector_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_loop)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_loop)},
    {0, nullptr},
};

}  // namespace

void bind_kernel(nb::module_& module) {
    using namespace nb::literals;
    module.attr("KERNEL_ABI") = STEPMILL_KERNEL_ABI;
    nb::class_<KernelLoop>(module, "KernelLoop", nb::type_slots(collector_slots), "The envs of a kernel, and the threads that run them.")
        .def(nb::init<std::shared_ptr<Slab>, nb::dict>(), "slab"_a, "settings"_a)
        .def("advance", &KernelLoop::advance, "is_waiting"_a, "Begin new commands and, if is_waiting, run envs or wait for one. Return whether there was anything to do.")
        .def("run_until", &KernelLoop::run_until, "server"_a, "after_ticket"_a, "Finish the command of an env, if its ticket is at most after_ticket.")
        .def("stop", &KernelLoop::stop, "timeout_s"_a, "End the threads. Return False if one is still in an env; it is not joined.")
        .def("last_reported", &KernelLoop::last_reported, nb::sig("def last_reported(self) -> int | None"), "Return the env that was reported last because it did not return within step_timeout_s, or None. For any thread.")
        .def("state_of", &KernelLoop::state_of, "server"_a, nb::sig("def state_of(self, server: int) -> typing.Any"), "Return a view of the bytes of an env's state.")
        .def("snapshot", &KernelLoop::snapshot, "server"_a, "Return a copy of the state of an env and of its newest result.")
        .def("restore", &KernelLoop::restore, "server"_a, "snapshot"_a, "Restore a snapshot.")
        .def("clear", &KernelLoop::clear, "Set all envs back to their state before the first reset.")
        .def("release", &KernelLoop::release, "Drop all references to Python objects.");
}

}  // namespace stepmill
