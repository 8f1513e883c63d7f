// Runs a command on an env: builds the action, calls `reset` or `step`, and unpacks the returned values. A function that returns false has
// set a Python exception; `phase` then says what the env was doing.
#define NO_IMPORT_ARRAY
#include "codec/blobs.hpp"
#include "shared/tree_visit.hpp"
#include "worker/loop.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace stepmill {

bool Loop::perform(std::uint32_t local, Result& result, const char*& phase) {
    ServedEnv& served = envs_[local];
    const bool is_reset = get_command(words_, local) == Command::RESET;
    if (!is_reset && !is_reset_due(local)) return perform_step(local, result, phase);
    phase = "reset";
    std::uint32_t attempts_left = reset_retries_;
    if (served.is_early) {
        const bool is_usable = !is_reset || matches_early_reset(local);  // other seeds or options need another episode
        const bool is_retried = served.early_error && std::string_view(served.early_phase) == "reset" && attempts_left != 0;
        if (is_usable && !is_retried) return use_early_reset(local, result, phase);
        if (is_usable) --attempts_left;  // the early reset was the first attempt
        discard_early_reset(served);
    }
    const bool is_done = reset_with_retries(local, result, !is_reset, attempts_left);
    if (!is_done && !result.obs && result.info) phase = "output of reset";  // as unpack_reset() marks it
    return is_done;
}

// Whether the next step begins an episode instead.
bool Loop::is_reset_due(std::uint32_t local) const { return envs_[local].needs_reset && autoreset_ == Autoreset::NEXT_STEP && !is_batched_; }

bool Loop::perform_reset(std::uint32_t local, Result& result, bool is_automatic) {
    nb::object seed, options;
    if (!read_reset(local, result, is_automatic, seed, options)) return false;
    const nb::object returned = call_reset(local, seed, options);
    if (!returned) return false;
    return unpack_reset(returned.ptr(), result);
}

// Reads the arguments of a reset; null stands for one that is not passed. Counts the episode that begins.
bool Loop::read_reset(std::uint32_t local, Result& result, bool is_automatic, nb::object& seed, nb::object& options) {
    ServedEnv& served = envs_[local];
    options = nb::none();
    if (is_automatic) begin_activity(*control_, local, served.is_early ? Activity::EARLY_RESET : Activity::RESET);  // the step's deadline does not apply to the reset
    const std::uint8_t flags = is_automatic ? 0 : words_.flags[local];
    if (flags & FLAG_BLOB) {
        nb::object blob;
        if (!read_blob(local, blob)) return false;
        seed = nb::borrow(PyTuple_GET_ITEM(blob.ptr(), 0));
        options = nb::borrow(PyTuple_GET_ITEM(blob.ptr(), 1));
        if (seed.is_none()) seed.reset();
        if (is_batched_ && PyDict_Check(options.ptr())) result.reset_mask = nb::borrow(PyDict_GetItemString(options.ptr(), "reset_mask"));
    }
    if (((flags & FLAG_SEED) || !seed) && served.seeds.begin(flags, words_.seed[local], words_.episode[local], seeding_) && !seed) {
        seed = nb::int_(served.seeds.of(slab_->plan.pool_server(slab_->plan.servers[worker_][local]), seeding_));
    }
    const bool uses_default_options = options.is_none() && served.has_options;
    if (uses_default_options) options = default_options(served);
    if (!options) return false;
    if (options.is_none() || (!uses_default_options && (is_automatic || (flags & FLAG_AUTO)))) options.reset();
    return true;
}

// Calls `reset` with those arguments that are not null.
nb::object Loop::call_reset(std::uint32_t local, nb::handle seed, nb::handle options) {
    const ServedEnv& served = envs_[local];
    TimedCall timed(envs_[local].reset_sampler, words_.counters[local].reset, unclaimed_time_, slab_->worker_trace(worker_));
    PyObject* args[2] = {seed ? seed.ptr() : Py_None, options.ptr()};
    PyObject* names = options ? reset_names_.ptr() : seed_name_.ptr();
    nb::object returned = nb::steal(!options && !seed ? PyObject_CallNoArgs(served.reset.ptr()) : PyObject_Vectorcall(served.reset.ptr(), args, 0, names));
    end_forked_copy();  // before anything is counted: the slab is not mapped in a forked process
    timed.end(TraceKind::RESET, slab_->plan.servers[worker_][local]);
    add_to(control_->own.counters.num_resets, 1);
    return returned;
}

nb::object Loop::call_step(std::uint32_t local, nb::handle action) {
    PyObject* args[2] = {nullptr, action.ptr()};  // the callee may use the place before its first argument
    TimedCall timed(envs_[local].step_sampler, words_.counters[local].step, unclaimed_time_, slab_->worker_trace(worker_));
    nb::object returned = nb::steal(PyObject_Vectorcall(envs_[local].step.ptr(), args + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    end_forked_copy();  // before anything is counted: the slab is not mapped in a forked process
    timed.end(TraceKind::STEP, slab_->plan.servers[worker_][local]);
    add_to(control_->own.counters.num_steps, batch_size_);
    return returned;
}

bool Loop::perform_step(std::uint32_t local, Result& result, const char*& phase) {
    phase = "action";
    const nb::object action = read_action(local);
    if (!action) return false;
    phase = "step";
    const nb::object returned = call_step(local, action);
    if (!returned) return false;
    bool is_reset_due = false;
    if (!accept_step(local, returned.ptr(), result, phase, is_reset_due)) return false;
    if (!is_reset_due || reset_with_retries(local, result, true, reset_retries_)) return true;
    if (result.info) phase = "output of reset";  // as unpack_reset() marks it
    return false;
}

nb::object Loop::read_action(std::uint32_t local) {
    nb::object opaques;
    if (words_.flags[local] & FLAG_BLOB) {
        nb::object blob;
        if (!read_blob(local, blob)) return {};
        opaques = nb::borrow(PyTuple_GET_ITEM(blob.ptr(), 2));
    }
    return nb::steal(build_action(local, opaques));
}

// Unpacks what `step` returned. `is_reset_due`: the episode is over, and its reset belongs to the same result.
bool Loop::accept_step(std::uint32_t local, PyObject* returned, Result& result, const char*& phase, bool& is_reset_due) {
    phase = "output of step";
    if (!(is_time_step_ ? unpack_time_step(returned, result) : unpack_step(envs_[local], returned, result))) return false;
    if (!result.is_over || autoreset_ != Autoreset::SAME_STEP) return true;
    if (!read_end(result)) {
        if (result.has_bad_info) phase = "info of step";
        return false;
    }
    phase = "reset";
    is_reset_due = !(words_.flags[local] & FLAG_LAST);
    if (is_reset_due) result.obs.reset(), result.info.reset(), result.alive.clear();
    else result.info = nb::steal(PyDict_New());  // the next episode will not be played
    return true;
}

bool Loop::read_blob(std::uint32_t local, nb::object& blob) {
    if (!read_blob_bytes(*slab_, slab_->plan.servers[worker_][local], buffer_)) {
        PyErr_SetString(PyExc_RuntimeError, "the options or the action of the command could not be read");
        return false;
    }
    blob = nb::steal(decode(buffer_.data(), buffer_.size(), {unpickler_.ptr(), nullptr}));
    return blob && PyTuple_Check(blob.ptr()) && PyTuple_GET_SIZE(blob.ptr()) == 3;
}

PyObject* Loop::build_action(std::uint32_t local, nb::handle opaques) {
    const std::uint32_t row = words_.row[local];
    if (action_.root.kind == Node::Kind::LEAF) return action_leaf(action_.root, row);
    return build_tree(
        action_.root, [&](const Node& node) { return action_leaf(node, row); },
        [&](const Node& node) -> PyObject* {
            PyObject* opaque = opaques.is_valid() ? PyList_GetItem(opaques.ptr(), node.index) : nullptr;
            Py_XINCREF(opaque);
            return opaque;
        });
}

PyObject* Loop::action_leaf(const Node& node, std::uint32_t row) {
    const Leaf& leaf = action_.leaves[static_cast<std::size_t>(node.index)];
    std::byte* value = slab_->base + leaf.column.at(0, row);
    if (!is_batched_) {
        if (node.leaf_kind == LeafKind::DISCRETE) return cached_scalar(leaf, value);
        if (node.leaf_kind == LeafKind::SCALAR) return PyArray_Scalar(value, leaf.dtype(), nullptr);
    }
    PyObject* array = new_array(leaf, is_batched_ ? static_cast<npy_intp>(batch_size_) : -1);
    if (array != nullptr) std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)), value, leaf.row_bytes * (is_batched_ ? batch_size_ : 1));
    return array;
}

// Returns the NumPy integer of a Discrete action. Small ones are cached: they are immutable, and most spaces have few values.
PyObject* Loop::cached_scalar(const Leaf& leaf, const std::byte* value) {
    std::int64_t number = 0;
    if (leaf.type_num != NPY_INT64) return PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr);
    std::memcpy(&number, value, sizeof number);
    if (number < 0 || number >= static_cast<std::int64_t>(cached_scalars_.size())) return PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr);
    nb::object& scalar = cached_scalars_[static_cast<std::size_t>(number)];
    if (!scalar) scalar = nb::steal(PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr));
    Py_XINCREF(scalar.ptr());
    return scalar.ptr();
}

}  // namespace stepmill
