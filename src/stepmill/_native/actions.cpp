// Actions into the slab: checked as a whole, then written.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "blobs.hpp"
#include "ledger.hpp"
#include "walks.hpp"

namespace stepmill {

// An array of `rows` rows of a leaf, in its dtype and C order; a new reference.
nb::object Ledger::plain_actions(const Leaf& leaf, PyObject* value, npy_intp rows) const {
    nb::object array = nb::steal(PyArray_FROM_O(value));
    if (!array) {
        PyErr_Clear();
        raise(errors().usage, "actions for leaf " + leaf.path + " are no array; give an array of shape [num_envs, ...]");
    }
    auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
    std::vector<npy_intp> dims{rows};
    dims.insert(dims.end(), leaf.shape.begin(), leaf.shape.end());
    const bool is_shape = PyArray_NDIM(source) == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), PyArray_DIMS(source));
    if (!is_shape) {
        const std::string got = text_of(array.attr("shape"));
        std::string wanted = std::to_string(dims[0]) + (dims.size() == 1 ? "," : "");
        for (std::size_t i = 1; i < dims.size(); ++i) wanted += ", " + std::to_string(dims[i]);
        raise(errors().usage, "actions for leaf " + leaf.path + " have shape " + got + "; give shape (" + wanted + ")");
    }
    if (PyArray_TYPE(source) == leaf.type_num && PyArray_ISCARRAY_RO(source) && leaf.is_native) return array;
    if (!PyArray_CanCastArrayTo(source, leaf.dtype(), NPY_SAME_KIND_CASTING)) {
        raise(errors().usage, "actions for leaf " + leaf.path + " have dtype " + text_of(array.attr("dtype")) +
                                  "; the action space wants " + text_of(leaf.descr));
    }
    Py_INCREF(leaf.descr.ptr());
    array = nb::steal(PyArray_FromArray(source, leaf.dtype(), NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    if (!array) throw nb::python_error();
    return array;
}

// Checks all, then writes all: a wrong action changes nothing.
void Ledger::write_actions(nb::handle actions, const Ids& ids, std::vector<nb::list>& opaques) {
    check_workers(ids, Command::STEP);
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    std::vector<nb::object> arrays(action_.leaves.size());
    if (action_.num_opaques != 0) opaques.resize(ids.size());
    auto leaf = [&](const Node& node, PyObject* value) {
        const auto index = static_cast<std::size_t>(node.index);
        arrays[index] = plain_actions(action_.leaves[index], value, rows);
        return true;
    };
    auto opaque = [&](const Node&, PyObject* value) {
        nb::object items = nb::steal(PySequence_Fast(value, "actions of a space without a fixed size must be a sequence, one per env"));
        if (!items) return false;
        if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())) != ids.size()) {
            PyErr_Format(PyExc_ValueError, "%zd actions for %zu envs", PySequence_Fast_GET_SIZE(items.ptr()), ids.size());
            return false;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) opaques[i].append(nb::handle(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))));
        return true;
    };
    if (!walk_tree(action_.root, actions.ptr(), leaf, opaque)) {
        nb::python_error cause;
        raise(errors().usage, "the actions do not fit the action space: " + text_of(cause.value()));
    }
    std::size_t held_offset = 0;
    for (std::size_t index = 0; index < arrays.size(); ++index) {
        const Column& column = action_.leaves[index].column;
        const auto* source = static_cast<const std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(arrays[index].ptr())));
        const std::size_t env_bytes = column.row_bytes * batch_size_;
        if (is_all(ids) && num_held_envs_ == 0) {
            std::memcpy(slab_->base + column.at(0, 0), source, env_bytes * num_envs_);
            continue;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            Replay* replay = envs_[ids[i]].replay.get();  // its row is in use
            std::memcpy(replay ? replay->action.data() + held_offset : slab_->base + column.at(0, row_of(ids[i])), source + i * env_bytes, env_bytes);
        }
        held_offset += env_bytes;
    }
    // A server that has its next episode staged is given nothing: the words are those of that reset, which may still run.
    for (const std::uint32_t id : ids) {
        const Seat seat = slab_->seats[envs_[id].server];
        if (!takes_staged(id, Command::STEP) && (num_held_envs_ == 0 || !envs_[id].replay)) slab_->words[seat.worker].flags[seat.local] = 0;
    }
    for (std::size_t i = 0; i < opaques.size(); ++i) {
        if (!takes_staged(ids[i], Command::STEP) && !envs_[ids[i]].replay) write_blob(ids[i], nb::make_tuple(nb::none(), nb::none(), opaques[i]).ptr());
    }
}

void Ledger::write_blob(std::uint32_t env_id, PyObject* blob) {
    const Seat seat = slab_->seats[envs_[env_id].server];
    ServerWords& words = slab_->words[seat.worker];
    buffer_.clear();
    if (!encoder_.encode(blob, buffer_)) throw nb::python_error();
    if (!write_small_blob(*slab_, envs_[env_id].server, buffer_)) {
        OverflowRef ref;
        const int error = blobs_[seat.worker].write(seat.local, buffer_.data(), buffer_.size(), ref);
        if (error != 0) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        words.blob_offset[seat.local] = ref.offset;
        words.blob_bytes[seat.local] = ref.size;
        words.blob_generation[seat.local] = ref.generation;
    }
    words.flags[seat.local] |= FLAG_BLOB;
}

}  // namespace stepmill
