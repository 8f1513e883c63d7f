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
        .def("help", &KernelLoop::help, "is_waiting"_a, "Begin what was commanded; to wait, run envs, or wait for one. Whether there was anything.")
        .def("run_until", &KernelLoop::run_until, "server"_a, "after_ticket"_a, "Do what was commanded of an env, if its ticket is at most after_ticket.")
        .def("stop", &KernelLoop::stop, "timeout_s"_a, "End the threads. False: one is still in an env, and is left behind.")
        .def("state_of", &KernelLoop::state_of, "server"_a, nb::sig("def state_of(self, server: int) -> typing.Any"), "The bytes of an env's state, a view.")
        .def("snapshot", &KernelLoop::snapshot, "server"_a, "A copy of all that an env remembers.")
        .def("restore", &KernelLoop::restore, "server"_a, "snapshot"_a, "Make an env what it was.")
        .def("clear", &KernelLoop::clear, "Make all envs as they were before their first reset.")
        .def("release", &KernelLoop::release, "Drop every reference to Python objects.");
}

}  // namespace stepmill
