// An owned reference to a Python object, dropped at the end of its scope. Needs the GIL wherever it ends.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

namespace stepmill {

struct DropReference {
    void operator()(PyObject* obj) const noexcept { Py_DECREF(obj); }
};

using PyRef = std::unique_ptr<PyObject, DropReference>;  // of a new reference; share(obj) for a borrowed one

inline PyRef share(PyObject* obj) noexcept { return PyRef(Py_XNewRef(obj)); }

}  // namespace stepmill
