// Helpers for code that uses Python's C API: owned references, and the current exception. Needs the GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace stepmill {

struct DropReference {
    void operator()(PyObject* obj) const noexcept { Py_DECREF(obj); }
};

// Dropped at the end of its scope.
using PyRef = std::unique_ptr<PyObject, DropReference>;  // for a new reference; share(obj) for a borrowed one

inline PyRef share(PyObject* obj) noexcept { return PyRef(Py_XNewRef(obj)); }

// Returns the current exception with its traceback, and clears it; a new reference.
inline PyObject* raised_exception() {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
#endif
}

inline void set_exception(PyObject* exception) { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception); }

// Sets the subclass of OSError that belongs to an errno; returns false.
inline bool set_os_error(int error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return false;
}

// Sets the OSError of a value for which there is no shared memory; returns false.
inline bool set_size_error(int error, std::size_t size_bytes) {
    const PyRef text(PyUnicode_FromFormat("%s: a value of %zu bytes must fit in the free memory, and in the largest file that `ulimit -f` allows", std::strerror(error), size_bytes));
    const PyRef exception(text != nullptr ? PyObject_CallFunction(PyExc_OSError, "iO", error, text.get()) : nullptr);
    if (exception != nullptr) set_exception(exception.get());
    return false;
}

}  // namespace stepmill
