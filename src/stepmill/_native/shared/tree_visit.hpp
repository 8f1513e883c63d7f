// Builds and visits trees. The visitors are template arguments, so that the compiler inlines them: every result passes through here.
// Needs the GIL.
#pragma once

#include "shared/tree.hpp"

namespace stepmill {

// Report that an object does not match its tree. All return false, with an exception set.
bool refuse_structure(const Node& node, const char* wanted, PyObject* got);
bool refuse_size(const Node& node, Py_ssize_t size);
bool refuse_keys(const Node& node, PyObject* object);  // keeps an exception other than KeyError

bool is_empty_nest(PyObject* object);

// Returns an empty tuple of the node's class, to be filled; a new reference.
PyObject* new_tuple(const Node& node);

// Builds the object that a tree describes. leaf(Node) and opaque(Node) return new references, or null with an exception set.
template <typename MakeLeaf, typename MakeOpaque>
PyObject* build_tree(const Node& node, const MakeLeaf& leaf, const MakeOpaque& opaque) {
    if (node.kind == Node::Kind::LEAF) return leaf(node);
    if (node.kind == Node::Kind::OPAQUE) return opaque(node);
    if (node.kind == Node::Kind::DICT) {
        nb::object dict = nb::steal(PyDict_New());
        for (std::size_t i = 0; dict && i < node.children.size(); ++i) {
            nb::object child = nb::steal(build_tree(node.children[i], leaf, opaque));
            if (!child || PyDict_SetItem(dict.ptr(), node.keys[i].ptr(), child.ptr()) != 0) return nullptr;
        }
        return dict.release().ptr();
    }
    nb::object tuple = nb::steal(new_tuple(node));
    for (std::size_t i = 0; tuple && i < node.children.size(); ++i) {
        PyObject* child = build_tree(node.children[i], leaf, opaque);
        if (child == nullptr) return nullptr;
        PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), child);
    }
    if (!tuple || node.factory.is_none() || node.is_named_tuple) return tuple.release().ptr();
    return PyObject_CallObject(node.factory.ptr(), tuple.ptr());
}

template <typename VisitLeaf, typename VisitOpaque>
bool visit_tree(const Node& node, PyObject* object, const VisitLeaf& leaf, const VisitOpaque& opaque);

template <typename VisitLeaf, typename VisitOpaque>
bool visit_dict(const Node& node, PyObject* object, const VisitLeaf& leaf, const VisitOpaque& opaque) {
    if (!PyDict_Check(object) && !PyObject_HasAttrString(object, "keys")) return refuse_structure(node, "a dict", object);
    for (std::size_t i = 0; i < node.children.size(); ++i) {
        nb::object child = nb::steal(PyObject_GetItem(object, node.keys[i].ptr()));
        if (!child) return refuse_keys(node, object);
        if (!visit_tree(node.children[i], child.ptr(), leaf, opaque)) return false;
    }
    if (node.allows_more_keys) return true;
    const Py_ssize_t size = PyObject_Size(object);
    if (size < 0) return false;
    return static_cast<std::size_t>(size) == node.children.size() || refuse_keys(node, object);
}

template <typename VisitLeaf, typename VisitOpaque>
bool visit_tuple(const Node& node, PyObject* object, const VisitLeaf& leaf, const VisitOpaque& opaque) {
    if (!PyTuple_Check(object) && !PyList_Check(object)) return refuse_structure(node, "a tuple", object);
    // A list is copied: reading an item may run code that changes the list.
    const nb::object items = PyTuple_Check(object) ? nb::borrow(object) : nb::steal(PySequence_Tuple(object));
    if (!items) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(items.ptr());
    if (static_cast<std::size_t>(size) != node.children.size()) return refuse_size(node, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
        const Node& child = node.children[static_cast<std::size_t>(i)];
        PyObject* item = PyTuple_GET_ITEM(items.ptr(), i);
        if (!(child.kind == Node::Kind::LEAF ? leaf(child, item) : visit_tree(child, item, leaf, opaque))) return false;
    }
    return true;
}

// Visits each part of an object with a borrowed reference. Returns false, with an exception set, if a visitor does or the structure differs.
template <typename VisitLeaf, typename VisitOpaque>
bool visit_tree(const Node& node, PyObject* object, const VisitLeaf& leaf, const VisitOpaque& opaque) {
    if (node.kind == Node::Kind::LEAF) return leaf(node, object);
    if (node.kind == Node::Kind::OPAQUE) return opaque(node, object);
    if (node.children.empty() && is_empty_nest(object)) return true;
    return node.kind == Node::Kind::DICT ? visit_dict(node, object, leaf, opaque) : visit_tuple(node, object, leaf, opaque);
}

}  // namespace stepmill
