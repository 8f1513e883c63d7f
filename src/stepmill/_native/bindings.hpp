// Each function adds the classes and functions of one file to the module; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

namespace nb = nanobind;

void bind_core(nanobind::module_& module);      // Slab, Loop, PoolState, ExternalPoolLoop
void bind_codec(nanobind::module_& module);     // encode, decode
void bind_system(nanobind::module_& module);    // OwnedFd, watch_parent, usable_cores, pidfd_send_signal …; turns std::system_error into OSError
void bind_backends(nanobind::module_& module);  // Reaper, KernelLoop, PoolRelay, NodeRelay; must follow the class Slab

// nanobind classes take part in garbage collection only with these slots. Envs and callbacks refer back to pools.
template <typename Type>
int traverse_class(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    return nb::inst_ptr<Type>(self)->traverse(visit, arg);
}

template <typename Type>
int clear_class(PyObject* self) {
    nb::inst_ptr<Type>(self)->release();
    return 0;
}

template <typename Type>
PyType_Slot* collector_slots() {
    static PyType_Slot slots[] = {
        {Py_tp_traverse, reinterpret_cast<void*>(traverse_class<Type>)},
        {Py_tp_clear, reinterpret_cast<void*>(clear_class<Type>)},
        {0, nullptr},
    };
    return slots;
}

}  // namespace stepmill
