// Trees of observations and actions: programs (spec/tree.py) as native code stores them. Needs the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "shared/numpy_api.hpp"
#include "shared/slab.hpp"

namespace stepmill {

namespace nb = nanobind;

// Owns a new reference that a function of the C API has returned; throws its exception if it is null.
inline nb::object checked(PyObject* fresh) {
    if (fresh == nullptr) throw nb::python_error();
    return nb::steal(fresh);
}

// Returns a new C array of `rows` items of a builtin type.
inline nb::object new_column(npy_intp rows, int type_num) { return checked(PyArray_SimpleNew(1, &rows, type_num)); }

template <typename Item>
Item* data_of(nb::handle array) {
    return static_cast<Item*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

enum class LeafKind : int { ARRAY = 0, SCALAR = 1, DISCRETE = 2 };

// The dtype and shape of a leaf, and its column.
struct Leaf {
    nb::object descr;  // PyArray_Descr
    int type_num = 0;
    bool is_native = true;  // native byte order
    std::vector<npy_intp> shape;
    std::size_t row_bytes = 0;
    PyTypeObject* scalar_type = nullptr;  // of a single number: the NumPy class whose values need no conversion
    Column column{};
    std::string path;  // index expression, for errors; empty: the observation or action is this leaf

    std::string name() const;
    PyArray_Descr* dtype() const noexcept { return reinterpret_cast<PyArray_Descr*>(descr.ptr()); }
};

// The offset of the value in a NumPy scalar, the same for all types of at most eight bytes.
constexpr std::size_t SCALAR_VALUE_AT = offsetof(PyDoubleScalarObject, obval);
static_assert(SCALAR_VALUE_AT == offsetof(PyBoolScalarObject, obval) && SCALAR_VALUE_AT == offsetof(PyLongLongScalarObject, obval));

struct Node {
    enum class Kind : int { LEAF = 0, DICT = 1, TUPLE = 2, OPAQUE = 3 };
    Kind kind = Kind::LEAF;
    int index = 0;  // of the leaf or the opaque
    LeafKind leaf_kind = LeafKind::ARRAY;
    std::vector<nb::object> keys;
    std::vector<Node> children;
    nb::object factory;  // None: a plain tuple
    bool is_named_tuple = false;  // the factory is a plain named tuple
    bool allows_more_keys = false;  // observations of envs: keys that the space lacks are ignored
    std::string path;    // index expression for errors, precomputed since visits are hot

    static Node parse(nb::handle program);
};

// Texts for messages: str(object), and a shape as Python prints it.
std::string text_of(nb::handle object);
std::string shape_text(const npy_intp* dims, int ndim);

// Parses a leaf (dtype, shape) with its column in the slab.
Leaf parse_leaf(nb::handle item, const Column& column);

// A node with its leaves.
struct Tree {
    Node root;
    std::vector<Leaf> leaves;
    int num_opaques = 0;

    static Tree parse(nb::handle program, nb::handle leaf_list, const std::vector<Column>& columns);
    Tree allow_more_keys() &&;
};

// Copies a NumPy scalar of exactly the leaf's type. Returns false, and writes nothing, for other values.
inline bool write_scalar(const Leaf& leaf, PyObject* value, std::byte* target) noexcept {
    if (Py_TYPE(value) != leaf.scalar_type) return false;
    const std::byte* source = reinterpret_cast<const std::byte*>(value) + SCALAR_VALUE_AT;
    switch (leaf.row_bytes) {  // a copy of constant size is one instruction
        case 8: std::memcpy(target, source, 8); break;
        case 4: std::memcpy(target, source, 4); break;
        default: std::memcpy(target, source, leaf.row_bytes);
    }
    return true;
}

// Copies `value` into `rows` rows of a leaf at `target`. If it returns false, a TypeError or ValueError that names the leaf is set.
// rows == 0: one row without a batch dimension.
bool write_leaf(const Leaf& leaf, PyObject* value, std::byte* target, npy_intp rows);

// Converts a number; reads NumPy's int32 and float32 directly. If it returns false, an exception is set.
bool read_integer(PyObject* value, long& number);
bool read_number(PyObject* value, double& number);

// Returns a new, uninitialised array [rows, *shape]. rows < 0: no batch dimension.
PyObject* new_array(const Leaf& leaf, npy_intp rows);

// Returns an array over memory that `base` keeps alive; adds a reference to `base`.
PyObject* view_array(const Leaf& leaf, npy_intp rows, std::byte* memory, PyObject* base);

}  // namespace stepmill
