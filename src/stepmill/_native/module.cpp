// Defines the extension module.
#include "shared/numpy_api.hpp"

#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The native core of stepmill.";
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    // At exit, daemon threads may keep objects alive, which is not a leak. Our tests turn the report on.
    nb::set_leak_warnings(std::getenv("STEPMILL_LEAK_WARNINGS") != nullptr);
    stepmill::bind_core(m);
    stepmill::bind_codec(m);
    stepmill::bind_system(m);
    stepmill::bind_backends(m);
}
