// Unpacks what an env returned, and writes everything except the observation: rewards, flags, living agents, and the parts of the info
// with a fixed shape.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "shared/tree_visit.hpp"
#include "worker/loop.hpp"

namespace stepmill {

namespace {

// Whether the current exception only says that the value has a wrong type. Other exceptions, for example of a signal handler, stay set.
bool is_refusal() { return PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError); }

bool read_flag(PyObject* value, const char* name, bool& flag) {
    if (value == Py_False || value == Py_True) {
        flag = value == Py_True;
        return true;
    }
    const int truth = PyObject_IsTrue(value);
    flag = truth > 0;
    if (truth >= 0) return true;
    if (!is_refusal()) return false;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s must be True or False, got %R", name, reinterpret_cast<PyObject*>(Py_TYPE(value)));
    return false;
}

// Envs that compute with arrays return a number as an array of shape (1,).
bool is_one_number(PyObject* value) {
    if (PyFloat_CheckExact(value) || !PyArray_Check(value)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    return PyArray_NDIM(array) == 1 && PyArray_SIZE(array) == 1 && (PyArray_ISNUMBER(array) || PyArray_ISBOOL(array));
}

bool read_reward(PyObject* value, double& reward) {
    if (is_one_number(value)) {
        const nb::object item = nb::steal(PySequence_GetItem(value, 0));
        return item && read_reward(item.ptr(), reward);
    }
    if (read_number(value, reward)) return true;
    if (!is_refusal()) return false;
    PyErr_Clear();
    const bool has_parts = PyArray_Check(value) || PyList_Check(value) || PyTuple_Check(value);
    const char* hint = has_parts ? " (an env whose rewards are vectors has a Box as its reward_space)" : "";
    PyErr_Format(PyExc_TypeError, "the reward must be a number, got %R%s", reinterpret_cast<PyObject*>(Py_TYPE(value)), hint);
    return false;
}

// Returns flags as a C array of `num` bools; null with an exception set.
nb::object flat_flags(nb::handle value, std::uint32_t num, const char* name, const char* unit) {
    nb::object array = nb::steal(PyArray_FROM_OTF(value.ptr(), NPY_BOOL, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    if (array && PyArray_SIZE(reinterpret_cast<PyArrayObject*>(array.ptr())) != static_cast<npy_intp>(num)) {
        PyErr_Format(PyExc_ValueError, "%s has %zd items, but the env has %u %s", name,
                     static_cast<Py_ssize_t>(PyArray_SIZE(reinterpret_cast<PyArrayObject*>(array.ptr()))), num, unit);
        array.reset();
    }
    return array;
}

const npy_bool* items(const nb::object& array) {
    return static_cast<const npy_bool*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

}  // namespace

// ---- what the env returned --------------------------------------------------------------------------------------

bool Loop::unpack_reset(PyObject* returned, Result& result) {
    const bool has_agents = slab_->plan.outcome.num_agents != 0;
    const Py_ssize_t size = PyTuple_Check(returned) ? PyTuple_GET_SIZE(returned) : 1;
    if (size != 2 && !(has_agents && size == 3)) {
        result.info = nb::none();  // marks that the env returned something invalid
        PyErr_Format(PyExc_TypeError, "reset must return (observation, info), got %R", reinterpret_cast<PyObject*>(Py_TYPE(returned)));
        return false;
    }
    if (size == 3 && !read_alive(PyTuple_GET_ITEM(returned, 2), result.alive)) {
        result.info = nb::none();
        return false;
    }
    result.obs = nb::borrow(PyTuple_GET_ITEM(returned, 0));
    result.info = nb::borrow(PyTuple_GET_ITEM(returned, 1));
    return true;
}

bool Loop::unpack_step(const ServedEnv& served, PyObject* returned, Result& result) {
    const bool has_agents = !is_plain_ && slab_->plan.outcome.num_agents != 0;
    const Py_ssize_t size = PyTuple_Check(returned) ? PyTuple_GET_SIZE(returned) : 1;
    if (size != 5 && !(has_agents && size == 6)) {
        PyErr_Format(PyExc_TypeError, "step must return the five values (observation, reward, terminated, truncated, info), got %zd values of %R",
                     size, reinterpret_cast<PyObject*>(Py_TYPE(returned)));
        return false;
    }
    result.obs = nb::borrow(PyTuple_GET_ITEM(returned, 0));
    result.info = nb::borrow(PyTuple_GET_ITEM(returned, 4));
    if (is_batched_ || !is_plain_) result.reward = nb::borrow(PyTuple_GET_ITEM(returned, 1));
    if (is_batched_) {
        result.terminated = nb::borrow(PyTuple_GET_ITEM(returned, 2));
        result.truncated = nb::borrow(PyTuple_GET_ITEM(returned, 3));
        return true;
    }
    if (has_agents) return unpack_agents(served, returned, result);
    if (!result.reward && !read_reward(PyTuple_GET_ITEM(returned, 1), result.reward_value)) return false;
    const bool is_read = read_flag(PyTuple_GET_ITEM(returned, 2), "terminated", result.is_terminated) &&
                         read_flag(PyTuple_GET_ITEM(returned, 3), "truncated", result.is_truncated);
    result.is_over = result.is_terminated || result.is_truncated;
    return is_read;
}

// Encodes the last observation and info of an episode, because a reset may change them in place, also arrays, lists and dicts inside
// them. No reset may follow if they do not fit: then returns false.
bool Loop::read_end(Result& result) {
    const nb::object opaques = nb::steal(PyList_New(0));
    auto fits = [&](const Leaf& leaf, PyObject* value) {
        buffer_.resize(leaf.row_bytes);
        return write_leaf(leaf, value, reinterpret_cast<std::byte*>(buffer_.data()), 0);
    };
    auto read = [&](const Node& node, PyObject* value) {
        const bool is_read = fits(obs_.leaves[static_cast<std::size_t>(node.index)], value);
        result.final_obs.insert(result.final_obs.end(), buffer_.begin(), buffer_.end());
        return is_read;
    };
    auto add = [&](const Node&, PyObject* value) { return PyList_Append(opaques.ptr(), value) == 0; };
    if (!opaques || !visit_tree(obs_.root, result.obs.ptr(), read, add) || (result.reward && !fits(reward_, result.reward.ptr())) || !check_info(result)) return false;
    PyObject* objects = nullptr;
    auto encode = [&](PyObject* part, std::vector<std::uint8_t>& bytes, const char* name) { return encoder_.encode(part, bytes, {name, objects_ ? &objects : nullptr}); };
    result.has_final = (obs_.num_opaques == 0 || encode(opaques.ptr(), result.final_opaques, OBS_PART));
    if (result.has_final && !encode(result.info.ptr(), result.final_info, "info")) {
        result.has_final = false;
        result.has_bad_info = PyErr_ExceptionMatches(PyExc_TypeError);
    }
    result.final_objects = nb::steal(objects);
    return result.has_final;
}

bool Loop::check_info(const Result& result) {
    if (PyDict_Check(result.info.ptr())) return true;
    PyErr_Format(PyExc_TypeError, "info must be a dict, got %R", reinterpret_cast<PyObject*>(Py_TYPE(result.info.ptr())));
    return false;
}

// The living agents are those that the env reports, or else those that were alive and have not ended. Without living agents the episode
// is over.
bool Loop::unpack_agents(const ServedEnv& served, PyObject* returned, Result& result) {
    const std::uint32_t num_agents = slab_->plan.outcome.num_agents;
    const nb::object terminated = flat_flags(PyTuple_GET_ITEM(returned, 2), num_agents, "terminated", "agents");
    const nb::object truncated = terminated ? flat_flags(PyTuple_GET_ITEM(returned, 3), num_agents, "truncated", "agents") : nb::object();
    if (!truncated) return false;
    agent_terminated_.assign(items(terminated), items(terminated) + num_agents);
    agent_truncated_.assign(items(truncated), items(truncated) + num_agents);
    if (PyTuple_GET_SIZE(returned) == 6) {
        if (!read_alive(PyTuple_GET_ITEM(returned, 5), result.alive)) return false;
    } else {
        result.alive = served.alive;
        for (std::uint32_t a = 0; a < num_agents; ++a) result.alive[a] = result.alive[a] && !agent_terminated_[a] && !agent_truncated_[a];
    }
    result.is_over = !slab_->plan.outcome.is_open && std::ranges::none_of(result.alive, [](std::uint8_t flag) { return flag != 0; });
    return true;
}

bool Loop::read_alive(PyObject* value, std::vector<std::uint8_t>& alive) const {
    const nb::object array = flat_flags(value, slab_->plan.outcome.num_agents, "alive", "agents");
    if (array) alive.assign(items(array), items(array) + slab_->plan.outcome.num_agents);
    return static_cast<bool>(array);
}

// A TimeStep is the observation. Reward and flags come from known indices of it.
bool Loop::unpack_time_step(PyObject* returned, Result& result) const {
    constexpr long LAST = 2;
    if (!PyTuple_Check(returned) || PyTuple_GET_SIZE(returned) <= std::max({step_type_at_, reward_at_, discount_at_})) {
        PyErr_Format(PyExc_TypeError, "step must return a TimeStep, got %R", reinterpret_cast<PyObject*>(Py_TYPE(returned)));
        return false;
    }
    result.obs = nb::borrow(returned);
    result.info = no_info_;
    long step_type = 0;
    if (!read_integer(PyTuple_GET_ITEM(returned, step_type_at_), step_type)) return false;
    const bool is_plain = slab_->plan.outcome.is_plain();
    if (reward_at_ >= 0 && !is_plain) result.reward = nb::borrow(PyTuple_GET_ITEM(returned, reward_at_));
    if (reward_at_ >= 0 && is_plain && !read_reward(PyTuple_GET_ITEM(returned, reward_at_), result.reward_value)) return false;
    if (step_type != LAST) return true;
    double discount = 0.0;
    if (!read_number(PyTuple_GET_ITEM(returned, discount_at_), discount)) return false;
    result.is_over = true;
    result.is_terminated = discount == 0.0;
    result.is_truncated = discount != 0.0;
    return true;
}

// ---- into the slab ----------------------------------------------------------------------------------------------

// Writes the parts of the info with a fixed shape to their columns and removes them from the info. Does not change the env's own dict.
bool Loop::write_info(std::uint32_t row, Result& result) {
    const npy_intp rows = is_batched_ ? static_cast<npy_intp>(batch_size_) : 0;
    for (const Leaf& leaf : info_.leaves) std::memset(slab_->base + leaf.column.at(0, row), 0, leaf.row_bytes * batch_size_);
    nb::object rest = nb::steal(PyDict_Copy(result.info.ptr()));
    if (!rest) return false;
    auto write = [&](const Node& node, PyObject* value) {
        const Leaf& leaf = info_.leaves[static_cast<std::size_t>(node.index)];
        return write_leaf(leaf, value, slab_->base + leaf.column.at(0, row), rows);
    };
    auto refuse = [](const Node&, PyObject*) { return false; };  // never called: these parts have no opaque leaves
    for (std::size_t i = 0; i < info_.root.children.size(); ++i) {
        PyObject* key = info_.root.keys[i].ptr();
        const nb::object value = nb::borrow(PyDict_GetItemWithError(rest.ptr(), key));
        if (!value && PyErr_Occurred()) return false;
        if (!value) continue;
        if (!visit_tree(info_.root.children[i], value.ptr(), write, refuse) || PyDict_DelItem(rest.ptr(), key) != 0) return false;
    }
    result.info = std::move(rest);
    return true;
}

void Loop::add_to_episode(ServedEnv& env, std::uint32_t row, std::uint32_t k) {
    if (is_plain_ && *slab_->over(row) == 0) {  // hot: a plain step that does not end the episode
        *slab_->episode_return(row) = env.episode_return[k] += *reinterpret_cast<const double*>(slab_->reward(row));
        *slab_->episode_length(row) = ++env.episode_length[k];
        return;
    }
    const std::uint32_t num_rewards = slab_->plan.outcome.num_rewards;
    double* running = env.episode_return.data() + std::size_t{k} * num_rewards;
    double* shared = slab_->episode_return(row);  // written in every step: after the death of a worker nothing else has them
    const bool is_end = *slab_->over(row) != 0;
    for (std::uint32_t i = 0; i < num_rewards; ++i) {
        shared[i] = running[i] + slab_->reward_item(row, i);
        running[i] = is_end ? 0.0 : shared[i];
    }
    *slab_->episode_length(row) = ++env.episode_length[k];
    if (!is_end) return;
    env.episode_length[k] = 0;
    add_to(control_->own.num_ended, 1);
    if (measures_memory_) control_->own.resident_bytes.store(resident_bytes(), std::memory_order_relaxed);
}

// With SAME_STEP, a reset with FLAG_AUTO replaces a step whose episode was cut short: its result has that episode's return and length.
bool Loop::replaces_step(std::uint32_t local) const {
    return autoreset_ == Autoreset::SAME_STEP && (words_.flags[local] & FLAG_AUTO);
}

void Loop::write_reset(ServedEnv& served, std::uint32_t row, const Result& result) {
    slab_->clear_outcome(row);
    std::ranges::fill(served.episode_return, 0.0);
    served.episode_length[0] = 0;
    if (served.alive.empty()) return;
    if (result.alive.empty()) std::ranges::fill(served.alive, std::uint8_t{1});
    else served.alive = result.alive;
    std::memcpy(slab_->alive(row), served.alive.data(), served.alive.size());
}

bool Loop::write_flags(std::uint32_t local, std::uint32_t row, Result& result) {
    ServedEnv& served = envs_[local];
    const bool is_reset = get_command(words_, local) == Command::RESET || (served.needs_reset && autoreset_ == Autoreset::NEXT_STEP);
    if (is_reset) {
        write_reset(served, row, result);
        if (!replaces_step(local)) slab_->clear_episode(row);
        return true;
    }
    if (result.reward) {
        if (!write_leaf(reward_, result.reward.ptr(), slab_->reward(row), 0)) return false;
    } else {
        *reinterpret_cast<double*>(slab_->reward(row)) = result.reward_value;
    }
    put<std::uint8_t>(*slab_->over(row), result.is_over);
    if (served.alive.empty()) {
        put<std::uint8_t>(*slab_->terminated(row), result.is_terminated);
        put<std::uint8_t>(*slab_->truncated(row), result.is_truncated);
    } else {
        const std::size_t num_agents = served.alive.size();
        std::memcpy(slab_->terminated(row), agent_terminated_.data(), num_agents);
        std::memcpy(slab_->truncated(row), agent_truncated_.data(), num_agents);
        if (result.has_final && result.alive.empty()) result.alive.assign(num_agents, 1);  // SAME_STEP: the agents of the next episode
        served.alive = result.alive;
        std::memcpy(slab_->alive(row), served.alive.data(), num_agents);
    }
    add_to_episode(served, row, 0);
    return true;
}

bool Loop::write_batched_flags(std::uint32_t local, std::uint32_t row, Result& result) {
    ServedEnv& served = envs_[local];
    const std::uint32_t num_rewards = slab_->plan.outcome.num_rewards;
    if (!result.reward) {  // a reset
        nb::object mask;  // a partial reset does not change the other rows
        if (result.reset_mask) mask = flat_flags(result.reset_mask, batch_size_, "reset_mask", "rows");
        if (result.reset_mask && !mask) return false;
        for (std::uint32_t k = 0; k < batch_size_; ++k) {
            if (mask && !items(mask)[k]) continue;
            slab_->clear_outcome(row + k);
            if (!replaces_step(local)) slab_->clear_episode(row + k);
            std::fill_n(served.episode_return.begin() + std::ptrdiff_t{k} * num_rewards, num_rewards, 0.0);
            served.episode_length[k] = 0, served.ended[k] = 0;
        }
        return true;
    }
    const nb::object terminated = flat_flags(result.terminated, batch_size_, "terminated", "rows");
    const nb::object truncated = terminated ? flat_flags(result.truncated, batch_size_, "truncated", "rows") : nb::object();
    if (!truncated || !write_leaf(reward_, result.reward.ptr(), slab_->reward(row), static_cast<npy_intp>(batch_size_))) return false;
    for (std::uint32_t k = 0; k < batch_size_; ++k) {
        *slab_->terminated(row + k) = items(terminated)[k] != 0;
        *slab_->truncated(row + k) = items(truncated)[k] != 0;
        *slab_->over(row + k) = items(terminated)[k] || items(truncated)[k];
        const bool is_reset = served.ended[k] && autoreset_ == Autoreset::NEXT_STEP;
        if (is_reset) slab_->clear_episode(row + k);
        else add_to_episode(served, row + k, k);
        served.ended[k] = *slab_->over(row + k);
    }
    return true;
}

}  // namespace stepmill
