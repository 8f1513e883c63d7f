#define NO_IMPORT_ARRAY
#include "shared/tree_visit.hpp"

#include <algorithm>
#include <cstring>

namespace stepmill {

namespace {

constexpr int MAX_DIMS = 65;  // NumPy's limit is 64; one more for the batch dimension. envs/ refuses larger spaces

std::string child_path(const std::string& path, nb::handle key) { return path + "[" + nb::cast<std::string>(nb::repr(key)) + "]"; }

void collect_paths(Node& node, const std::string& path, std::vector<Leaf>& leaves, int& num_opaques) {
    node.path = path;
    if (node.kind == Node::Kind::LEAF) leaves.at(static_cast<std::size_t>(node.index)).path = path;
    if (node.kind == Node::Kind::OPAQUE) ++num_opaques;
    for (std::size_t i = 0; i < node.children.size(); ++i) {
        const nb::object key = node.kind == Node::Kind::DICT ? node.keys[i] : nb::object(nb::int_(i));
        collect_paths(node.children[i], child_path(path, key), leaves, num_opaques);
    }
}

int batched_dims(const Leaf& leaf, npy_intp rows, npy_intp* dims) {
    int ndim = 0;
    if (rows >= 0) dims[ndim++] = rows;
    for (const npy_intp size : leaf.shape) dims[ndim++] = size;
    return ndim;
}

bool is_plain(PyArrayObject* array, const Leaf& leaf, const npy_intp* dims, int ndim) {
    if (!leaf.is_native || PyArray_TYPE(array) != leaf.type_num || PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) return false;
    for (int i = 0; i < ndim; ++i) {  // std::equal would call memcmp, which is slower
        if (dims[i] != PyArray_DIMS(array)[i]) return false;
    }
    return PyArray_ITEMSIZE(array) == static_cast<npy_intp>(PyDataType_ELSIZE(leaf.dtype()));
}

// Converts what is not a plain array of the right type with NumPy; refuses a conversion that loses information.
[[gnu::noinline]] bool convert_leaf(const Leaf& leaf, PyObject* value, std::byte* target, const npy_intp* dims, int ndim) {
    nb::object source = nb::steal(PyArray_FROM_O(value));
    if (!source) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(source.ptr());
    if (PyArray_NDIM(array) != ndim || !std::equal(dims, dims + ndim, PyArray_DIMS(array))) {
        if (PyArray_NDIM(array) == 0 && !PyArray_Check(value)) {
            PyErr_Format(PyExc_ValueError, "%s is a %s, but its space says shape %s", leaf.name().c_str(), Py_TYPE(value)->tp_name,
                         shape_text(dims, ndim).c_str());
            return false;
        }
        PyErr_Format(PyExc_ValueError, "%s has shape %s, but its space says %s", leaf.name().c_str(),
                     shape_text(PyArray_DIMS(array), PyArray_NDIM(array)).c_str(), shape_text(dims, ndim).c_str());
        return false;
    }
    if (!PyArray_CanCastArrayTo(array, leaf.dtype(), NPY_SAME_KIND_CASTING)) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S, which cannot be converted to its space's %S without loss", leaf.name().c_str(),
                     reinterpret_cast<PyObject*>(PyArray_DESCR(array)), leaf.descr.ptr());
        return false;
    }
    Py_INCREF(leaf.descr.ptr());
    nb::object sink = nb::steal(PyArray_NewFromDescr(&PyArray_Type, leaf.dtype(), ndim, dims, nullptr, target, NPY_ARRAY_CARRAY, nullptr));
    return sink && PyArray_CopyInto(reinterpret_cast<PyArrayObject*>(sink.ptr()), array) == 0;
}

// Returns the class of NumPy scalars of a type number; null for types that envs rarely use.
PyTypeObject* scalar_class(int type_num) {
    switch (type_num) {
        case NPY_FLOAT: return &PyFloatArrType_Type;
        case NPY_DOUBLE: return &PyDoubleArrType_Type;
        case NPY_BOOL: return &PyBoolArrType_Type;
        case NPY_BYTE: return &PyByteArrType_Type;
        case NPY_UBYTE: return &PyUByteArrType_Type;
        case NPY_SHORT: return &PyShortArrType_Type;
        case NPY_INT: return &PyIntArrType_Type;
        case NPY_LONG: return &PyLongArrType_Type;
        case NPY_LONGLONG: return &PyLongLongArrType_Type;
        default: return nullptr;
    }
}

// Whether a tuple class was made by `namedtuple`, or is a subclass that only adds methods: then its instances can be created without
// its constructor, which is written in Python and slow.
bool holds_fields_only(nb::handle factory, std::size_t num_fields) {
    if (Py_TYPE(factory.ptr()) != &PyType_Type) return false;  // None, a function, or a class with a metaclass
    auto* type = reinterpret_cast<PyTypeObject*>(factory.ptr());
    if (!PyType_IsSubtype(type, &PyTuple_Type) || type->tp_init != PyBaseObject_Type.tp_init) return false;
    const nb::object home = nb::getattr(nb::getattr(factory, "__new__"), "__module__", nb::none());
    const bool is_generated = PyUnicode_Check(home.ptr()) && nb::cast<std::string>(home).starts_with("namedtuple_");
    return is_generated && nb::len(nb::getattr(factory, "_fields", nb::tuple())) == num_fields;
}

const char* name_of(const Node& node, const char* top) { return node.path.empty() ? top : node.path.c_str(); }

}  // namespace

std::string shape_text(const npy_intp* dims, int ndim) {
    std::string text = "(";
    for (int i = 0; i < ndim; ++i) text += std::to_string(dims[i]) + (i + 1 < ndim || ndim == 1 ? "," : "") + (i + 1 < ndim ? " " : "");
    return text + ")";
}

std::string Leaf::name() const { return path.empty() ? "the observation" : path[0] == '[' ? "leaf " + path : path; }

std::string text_of(nb::handle object) {
    const nb::object text = checked(PyObject_Str(object.ptr()));
    return nb::cast<std::string>(text);
}

Node Node::parse(nb::handle program) {
    nb::tuple parts = nb::cast<nb::tuple>(program);
    Node node;
    node.kind = static_cast<Kind>(nb::cast<int>(parts[0]));
    node.factory = nb::none();
    if (node.kind == Kind::LEAF) {
        node.index = nb::cast<int>(parts[1]);
        node.leaf_kind = static_cast<LeafKind>(nb::cast<int>(parts[2]));
        return node;
    }
    if (node.kind == Kind::OPAQUE) {
        node.index = nb::cast<int>(parts[1]);
        return node;
    }
    const bool is_dict = node.kind == Kind::DICT;
    if (is_dict) {
        for (nb::handle key : nb::cast<nb::tuple>(parts[1])) node.keys.push_back(nb::borrow(key));
    } else {
        node.factory = nb::borrow(parts[2]);
    }
    for (nb::handle child : nb::cast<nb::tuple>(parts[is_dict ? 2 : 1])) node.children.push_back(parse(child));
    node.is_named_tuple = !is_dict && holds_fields_only(node.factory, node.children.size());
    return node;
}

Leaf parse_leaf(nb::handle item, const Column& column) {
    nb::tuple parts = nb::cast<nb::tuple>(item);
    Leaf leaf;
    leaf.descr = nb::borrow(parts[0]);
    leaf.type_num = leaf.dtype()->type_num;
    leaf.is_native = PyArray_ISNBO(leaf.dtype()->byteorder);
    for (nb::handle size : nb::cast<nb::tuple>(parts[1])) leaf.shape.push_back(nb::cast<npy_intp>(size));
    leaf.column = column;
    leaf.row_bytes = column.row_bytes;
    if (leaf.shape.empty() && leaf.is_native) leaf.scalar_type = scalar_class(leaf.type_num);
    return leaf;
}

Tree Tree::parse(nb::handle program, nb::handle leaf_list, const std::vector<Column>& columns) {
    Tree tree;
    tree.root = Node::parse(program);
    std::size_t index = 0;
    for (nb::handle item : leaf_list) {
        tree.leaves.push_back(parse_leaf(item, columns.at(index++)));
    }
    collect_paths(tree.root, "", tree.leaves, tree.num_opaques);
    return tree;
}

Tree Tree::allow_more_keys() && {
    auto allow = [](auto& self, Node& node) -> void {
        node.allows_more_keys = true;
        for (Node& child : node.children) self(self, child);
    };
    allow(allow, root);
    return std::move(*this);
}

bool refuse_structure(const Node& node, const char* wanted, PyObject* got) {
    PyErr_Format(PyExc_TypeError, "%s must be %s, got %R", name_of(node, "the top level"), wanted, reinterpret_cast<PyObject*>(Py_TYPE(got)));
    return false;
}

bool refuse_size(const Node& node, Py_ssize_t size) {
    PyErr_Format(PyExc_ValueError, "%s has %zd items, but its space has %zu", name_of(node, "the tuple"), size, node.children.size());
    return false;
}

bool refuse_keys(const Node& node, PyObject* object) {
    if (PyErr_Occurred()) {  // after a failed look-up
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) return false;
        PyErr_Clear();
    }
    const nb::object keys = nb::steal(PySequence_List(object));
    nb::object missing = nb::steal(PyList_New(0)), more = nb::steal(PyList_New(0)), wanted = nb::steal(PyList_New(0));
    if (!keys || !missing || !more || !wanted) return false;
    auto collect = [](const nb::object& from, const nb::object& other, const nb::object& to) {
        for (nb::handle key : from) {
            const int is_in = PySequence_Contains(other.ptr(), key.ptr());
            if (is_in < 0 || (is_in == 0 && PyList_Append(to.ptr(), key.ptr()) != 0)) return false;
        }
        return true;
    };
    for (const nb::object& key : node.keys) {
        if (PyList_Append(wanted.ptr(), key.ptr()) != 0) return false;
    }
    if (!collect(wanted, keys, missing) || !collect(keys, wanted, more)) return false;
    const bool lacks = PyList_GET_SIZE(missing.ptr()) != 0, has_more = PyList_GET_SIZE(more.ptr()) != 0;
    const char* name = name_of(node, "the dict");
    if (lacks && has_more) PyErr_Format(PyExc_ValueError, "%s lacks the keys %R of its space, and has the keys %R, which its space lacks", name, missing.ptr(), more.ptr());
    else if (lacks) PyErr_Format(PyExc_ValueError, "%s lacks the keys %R of its space", name, missing.ptr());
    else PyErr_Format(PyExc_ValueError, "%s has the keys %R, which its space lacks", name, more.ptr());
    return false;
}

// An env may return an empty tuple where its space has an empty dict, or the reverse, as ALF's do.
bool is_empty_nest(PyObject* object) {
    return (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 0) || (PyDict_Check(object) && PyDict_GET_SIZE(object) == 0) ||
           (PyList_Check(object) && PyList_GET_SIZE(object) == 0);
}

PyObject* new_tuple(const Node& node) {
    const auto size = static_cast<Py_ssize_t>(node.children.size());
    if (!node.is_named_tuple) return PyTuple_New(size);
    auto* type = reinterpret_cast<PyTypeObject*>(node.factory.ptr());
    return type->tp_alloc(type, size);
}

bool write_leaf(const Leaf& leaf, PyObject* value, std::byte* target, npy_intp rows) {
    if (rows <= 0 && write_scalar(leaf, value, target)) return true;
    npy_intp dims[MAX_DIMS];
    const int ndim = batched_dims(leaf, rows > 0 ? rows : -1, dims);
    if (PyArray_Check(value)) {
        auto* array = reinterpret_cast<PyArrayObject*>(value);
        if (is_plain(array, leaf, dims, ndim)) {
            std::memcpy(target, PyArray_DATA(array), leaf.row_bytes * static_cast<std::size_t>(rows > 0 ? rows : 1));
            return true;
        }
    }
    return convert_leaf(leaf, value, target, dims, ndim);
}

bool read_integer(PyObject* value, long& number) {
    if (Py_TYPE(value) == &PyIntArrType_Type) {
        number = PyArrayScalar_VAL(value, Int);
        return true;
    }
    number = PyLong_AsLong(value);
    return number != -1 || !PyErr_Occurred();
}

bool read_number(PyObject* value, double& number) {
    if (Py_TYPE(value) == &PyFloatArrType_Type) {
        number = PyArrayScalar_VAL(value, Float);
        return true;
    }
    number = PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : PyFloat_AsDouble(value);
    return number != -1.0 || !PyErr_Occurred();
}

PyObject* new_array(const Leaf& leaf, npy_intp rows) {
    npy_intp dims[MAX_DIMS];
    const int ndim = batched_dims(leaf, rows, dims);
    Py_INCREF(leaf.descr.ptr());
    return PyArray_NewFromDescr(&PyArray_Type, leaf.dtype(), ndim, dims, nullptr, nullptr, 0, nullptr);
}

PyObject* view_array(const Leaf& leaf, npy_intp rows, std::byte* memory, PyObject* base) {
    npy_intp dims[MAX_DIMS];
    const int ndim = batched_dims(leaf, rows, dims);
    Py_INCREF(leaf.descr.ptr());
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, leaf.dtype(), ndim, dims, nullptr, memory, NPY_ARRAY_CARRAY, nullptr);
    if (array == nullptr) return nullptr;
    Py_INCREF(base);
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), base) != 0) {
        Py_DECREF(array);
        return nullptr;
    }
    return array;
}

}  // namespace stepmill
