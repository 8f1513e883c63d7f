// The one extension module. Each file adds its part.
#include "numpy_api.hpp"

#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The native core of stepmill.";
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    // A daemon thread that steps or hangs at the end of the program keeps objects alive, which is no fault. Our own tests want the report.
    nb::set_leak_warnings(std::getenv("STEPMILL_LEAK_WARNINGS") != nullptr);
    stepmill::bind_core(m);
    stepmill::bind_codec(m);
    stepmill::bind_system(m);
    stepmill::bind_reaper(m);
    stepmill::bind_foreign(m);
}
