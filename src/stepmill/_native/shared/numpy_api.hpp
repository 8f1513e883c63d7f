// The NumPy C API, shared by all translation units: module.cpp imports it, all others define NO_IMPORT_ARRAY first.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL stepmill_ARRAY_API
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
