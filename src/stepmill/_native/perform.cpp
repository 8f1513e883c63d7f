// Runs a command on an env: builds the action, calls `reset` or `step`, and unpacks the returned values.
#define NO_IMPORT_ARRAY
#include "blobs.hpp"
#include "loop.hpp"
#include "seeds.hpp"
#include "tree_visit.hpp"

#include <algorithm>
#include <cstring>

namespace stepmill {

bool Loop::perform(std::uint32_t local, Result& result, const char*& phase) {
    ServedEnv& served = envs_[local];
    const bool is_reset = get_command(words_, local) == Command::RESET;
    const bool is_due = served.needs_reset && autoreset_ == Autoreset::NEXT_STEP && !is_batched_;
    if (!is_reset && !is_due) return perform_step(local, result, phase);
    phase = "reset";
    std::uint32_t attempts_left = reset_retries_;
    if (served.is_early) {
        const bool is_wanted = !is_reset || matches_early_reset(local);  // other seeds or options need another episode
        const bool is_retried = served.early_error && served.early_phase[0] == 'r' && attempts_left != 0;
        if (is_wanted && !is_retried) return use_early_reset(local, result, phase);
        if (is_wanted) --attempts_left;
        discard_early_reset(served);
    }
    const bool is_done = perform_reset_again(local, result, !is_reset, attempts_left);
    if (!is_done && !result.obs && result.info) phase = "output of reset";
    return is_done;
}

bool Loop::perform_reset(std::uint32_t local, Result& result, bool is_automatic) {
    ServedEnv& served = envs_[local];
    nb::object seed, options = nb::none();
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
    if (flags & FLAG_SEED) {
        served.base_seed = words_.seed[local];
        served.has_seed = true;
        served.episode = (flags & FLAG_EPISODE) ? words_.episode[local] : 0;
        if (!seed) seed = nb::int_(episode_seed(local));
    } else if (!seed && served.has_seed && seeding_ != Seeding::CONTINUE) {
        ++served.episode;
        seed = nb::int_(episode_seed(local));
    }
    const bool uses_default = options.is_none() && served.has_options;
    if (uses_default) options = default_options(served);
    if (!options) return false;
    const bool has_options = uses_default || (!is_automatic && !(flags & FLAG_AUTO));
    const nb::object returned = call_reset(local, seed, has_options ? options : nb::object());
    if (!returned) return false;
    return unpack_reset(returned.ptr(), result);
}

// Calls `reset` with those arguments that are not null.
nb::object Loop::call_reset(std::uint32_t local, nb::handle seed, nb::handle options) {
    const ServedEnv& served = envs_[local];
    TimedCall timed(envs_[local].reset_sampler, words_.counters[local].reset, slab_->worker_trace(worker_));
    PyObject* args[2] = {seed ? seed.ptr() : Py_None, options.ptr()};
    PyObject* names = options ? reset_names_.ptr() : seed_name_.ptr();
    nb::object returned = nb::steal(!options && !seed ? PyObject_CallNoArgs(served.reset.ptr()) : PyObject_Vectorcall(served.reset.ptr(), args, 0, names));
    end_stray_copy();  // before anything is counted: a copy has no slab
    timed.end(TraceKind::RESET, slab_->plan.servers[worker_][local]);
    add_to(control_->num_resets, 1);
    return returned;
}

nb::object Loop::call_step(std::uint32_t local, nb::handle action) {
    PyObject* args[2] = {nullptr, action.ptr()};  // vectorcall lets the callee use args[-1]
    TimedCall timed(envs_[local].step_sampler, words_.counters[local].step, slab_->worker_trace(worker_));
    nb::object returned = nb::steal(PyObject_Vectorcall(envs_[local].step.ptr(), args + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    end_stray_copy();  // before anything is counted: a copy has no slab
    timed.end(TraceKind::STEP, slab_->plan.servers[worker_][local]);
    add_to(control_->num_steps, batch_size_);
    return returned;
}

std::uint64_t Loop::episode_seed(std::uint32_t local) const {
    const ServedEnv& served = envs_[local];
    const std::uint32_t server = slab_->plan.servers[worker_][local];
    const std::uint32_t seed_id = slab_->plan.seed_ids.empty() ? server : slab_->plan.seed_ids.at(server);
    return seed_of_episode(seeding_ == Seeding::FIXED, served.base_seed, seed_id, served.episode);
}

bool Loop::perform_step(std::uint32_t local, Result& result, const char*& phase) {
    ServedEnv& served = envs_[local];
    phase = "action";
    nb::object opaques;
    if (words_.flags[local] & FLAG_BLOB) {
        nb::object blob;
        if (!read_blob(local, blob)) return false;
        opaques = nb::borrow(PyTuple_GET_ITEM(blob.ptr(), 2));
    }
    nb::object action = nb::steal(build_action(local, opaques));
    if (!action) return false;
    phase = "step";
    const nb::object returned = call_step(local, action);
    if (!returned) return false;
    phase = "output of step";
    if (!(is_time_step_ ? unpack_time_step(returned.ptr(), result) : unpack_step(served, returned.ptr(), result))) return false;
    if (!result.is_over || autoreset_ != Autoreset::SAME_STEP) return true;
    phase = "reset";
    result.final_obs = std::move(result.obs);
    result.final_info = std::move(result.info);
    if (words_.flags[local] & FLAG_LAST) {  // the next episode will not be played
        result.obs = result.final_obs;
        result.info = nb::steal(PyDict_New());
        return true;
    }
    result.obs.reset(), result.info.reset(), result.alive.clear();
    if (perform_reset_again(local, result, true, reset_retries_)) return true;
    if (result.info) phase = "output of reset";
    return false;
}

bool Loop::read_blob(std::uint32_t local, nb::object& blob) {
    if (!read_blob_bytes(*slab_, worker_, local, buffer_)) {
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
        if (node.leaf_kind == LeafKind::DISCRETE) return interned(leaf, value);
        if (node.leaf_kind == LeafKind::SCALAR) return PyArray_Scalar(value, leaf.dtype(), nullptr);
    }
    PyObject* array = new_array(leaf, is_batched_ ? static_cast<npy_intp>(batch_size_) : -1);
    if (array != nullptr) std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)), value, leaf.row_bytes * (is_batched_ ? batch_size_ : 1));
    return array;
}

// Caches the NumPy integers of Discrete actions: they are immutable, and most spaces have few values.
PyObject* Loop::interned(const Leaf& leaf, const std::byte* value) {
    std::int64_t number = 0;
    if (leaf.type_num != NPY_INT64) return PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr);
    std::memcpy(&number, value, sizeof number);
    if (number < 0 || number >= static_cast<std::int64_t>(interned_.size())) return PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr);
    nb::object& scalar = interned_[static_cast<std::size_t>(number)];
    if (!scalar) scalar = nb::steal(PyArray_Scalar(const_cast<std::byte*>(value), leaf.dtype(), nullptr));
    Py_XINCREF(scalar.ptr());
    return scalar.ptr();
}

}  // namespace stepmill
