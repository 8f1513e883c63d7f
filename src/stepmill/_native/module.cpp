// The one extension module. Each file adds its part.
#include "numpy_api.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The native core of stepmill.";
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    stepmill::bind_core(m);
    stepmill::bind_codec(m);
    stepmill::bind_system(m);
    stepmill::bind_reaper(m);
    stepmill::bind_foreign(m);
}
