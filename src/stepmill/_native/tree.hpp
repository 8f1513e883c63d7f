// Trees of observations and actions: what a program (spec/tree.py) says, as native code walks it. GIL held throughout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "numpy_api.hpp"
#include "slab.hpp"

namespace stepmill {

namespace nb = nanobind;

enum class LeafKind : int { ARRAY = 0, SCALAR = 1, DISCRETE = 2 };

// What a leaf of one row looks like, and where its column lies.
struct Leaf {
    nb::object descr;  // PyArray_Descr
    int type_num = 0;
    bool is_native = true;  // byte order
    std::vector<npy_intp> shape;
    std::size_t row_bytes = 0;
    PyTypeObject* scalar_type = nullptr;  // of a single number: the NumPy class whose values need no conversion
    Column column{};
    std::string path;

    PyArray_Descr* dtype() const noexcept { return reinterpret_cast<PyArray_Descr*>(descr.ptr()); }
};

// Where NumPy's scalars hold their value: all those of at most eight bytes alike.
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
    bool is_named_tuple = false;  // the factory is a class of tuples that holds its fields, and does no more
    std::string path;    // how one would index it, for errors: made once, a walk is hot

    static Node parse(nb::handle program);
};

// str(object), for messages.
std::string text_of(nb::handle object);

// A leaf from (dtype, shape), and the column that it has in the slab.
Leaf parse_leaf(nb::handle item, const Column& column);

// A node with its leaves.
struct Tree {
    Node root;
    std::vector<Leaf> leaves;
    int num_opaques = 0;

    static Tree parse(nb::handle program, nb::handle leaf_list, const std::vector<Column>& columns);
};

// Copies a NumPy scalar of the leaf's very own type, as most envs return them. False: it is something else, and nothing is written.
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

// Copies `value` into `rows` rows of a leaf at `target`. False: a TypeError or ValueError that names the leaf is set.
// rows == 0 means: one row, without a batch dimension.
bool write_leaf(const Leaf& leaf, PyObject* value, std::byte* target, npy_intp rows);

// A number of any kind that Python converts; NumPy's int32 and float32 are read directly. False: an exception is set.
bool read_integer(PyObject* value, long& number);
bool read_number(PyObject* value, double& number);

// A fresh array over [rows, *shape] that copies nothing: memory is uninitialised. rows < 0: no batch dimension.
PyObject* new_array(const Leaf& leaf, npy_intp rows);

// An array over memory that `base` keeps alive (a reference is taken).
PyObject* view_array(const Leaf& leaf, npy_intp rows, std::byte* memory, PyObject* base);

}  // namespace stepmill
