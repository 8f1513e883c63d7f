// Fresh arrays for what a batch hands out, and one column of the slab gathered into such an array.
// For files that define NO_IMPORT_ARRAY.
#pragma once

#include <algorithm>
#include <cstring>

#include "ledger.hpp"

namespace stepmill {

// A fresh C array of `rows` items of a builtin type.
inline nb::object new_column(npy_intp rows, int type_num) {
    nb::object array = nb::steal(PyArray_SimpleNew(1, &rows, type_num));
    if (!array) throw nb::python_error();
    return array;
}

template <typename Item>
Item* data_of(nb::handle array) {
    return static_cast<Item*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

inline nb::object checked(PyObject* fresh) {
    if (fresh == nullptr) throw nb::python_error();
    return nb::steal(fresh);
}

template <typename Item>
nb::object Ledger::gather_column(const Ids& ids, const Item* column, int type_num) const {
    nb::object array = new_column(static_cast<npy_intp>(ids.size() * batch_size_), type_num);
    auto* target = data_of<Item>(array);
    if (is_all(ids)) {
        std::memcpy(target, column, sizeof(Item) * num_envs_ * batch_size_);
        return array;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        std::memcpy(target + i * batch_size_, column + row_of(ids[i]), sizeof(Item) * batch_size_);
    }
    return array;
}

}  // namespace stepmill
