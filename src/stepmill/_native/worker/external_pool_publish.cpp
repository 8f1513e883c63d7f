// Results of an external pool: writes rows of its arrays to the slab.
#define NO_IMPORT_ARRAY
#include <cstring>
#include <string>

#include "shared/tree_visit.hpp"
#include "worker/external_pool.hpp"

namespace stepmill {

namespace {

// Converts to a C array of `num` items; throws if the size differs.
nb::object flat_array(nb::handle value, int type_num, std::size_t num, const char* name) {
    nb::object array = checked(PyArray_FROM_OTF(value.ptr(), type_num, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    const Py_ssize_t size = PyArray_SIZE(reinterpret_cast<PyArrayObject*>(array.ptr()));
    if (static_cast<std::size_t>(size) == num) return array;
    PyErr_Format(PyExc_ValueError, "the external pool returned %zd items of %s for %zu envs", size, name, num);
    throw nb::python_error();
}

template <typename Item>
const Item* items(const nb::object& array) {
    return static_cast<const Item*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

// Returns one row of merged infos: a dict with the row of each array, as NumPy scalar or array. Other values go to every row.
nb::object info_row(nb::handle infos, std::size_t row, std::size_t num_rows) {
    nb::dict own;
    for (auto [key, value] : nb::borrow<nb::dict>(infos)) {
        auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
        if (PyDict_Check(value.ptr())) {
            own[key] = info_row(value, row, num_rows);
        } else if (!PyArray_Check(value.ptr()) || PyArray_NDIM(array) == 0 || static_cast<std::size_t>(PyArray_DIM(array, 0)) != num_rows) {
            own[key] = value;
        } else if (PyArray_NDIM(array) == 1) {
            own[key] = nb::steal(PyArray_ToScalar(PyArray_GETPTR1(array, static_cast<npy_intp>(row)), array));
        } else {
            own[key] = value[row];
        }
    }
    return own;
}

}  // namespace

struct ExternalPoolLoop::Rows {
    Servers servers;
    std::vector<nb::object> leaves;
    nb::object reward, terminated, truncated;  // null if all rows belong to resets

    bool is_end(std::size_t row) const { return terminated && (items<npy_bool>(terminated)[row] || items<npy_bool>(truncated)[row]); }
    const std::byte* value(const Leaf& leaf, std::size_t index, std::size_t row) const { return items<std::byte>(leaves[index]) + row * leaf.row_bytes; }
};

// Writes results: row j belongs to servers[j]. Drops rows of servers without an outstanding command.
// Returns the servers whose result waits for a reset (SAME_STEP), which the caller must begin.
nb::list ExternalPoolLoop::publish(nb::handle servers, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle infos) {
    Rows rows;
    rows.servers = parse_servers(servers);
    read_rows(rows, obs, reward, terminated, truncated);
    if (!infos.is_none() && !PyDict_Check(infos.ptr())) throw nb::type_error("the infos of an external pool must be a dict of arrays");
    nb::list again;
    std::vector<std::size_t> places;  // rows to be published now
    for (std::size_t row = 0; row < rows.servers.size(); ++row) {
        const std::uint32_t local = rows.servers[row];
        if (!envs_[local].is_outstanding) continue;
        if (!needs_reset_first(local, rows, row)) {
            places.push_back(row);
            continue;
        }
        hold_for_reset(local, rows, row, infos);
        again.append(local);
    }
    publish_rows(rows, places, infos);
    report_progress();
    return again;
}

// Between claim_result and finish() nothing throws: every claimed result is published.
void ExternalPoolLoop::publish_rows(const Rows& rows, std::vector<std::size_t>& places, nb::handle infos) {
    std::erase_if(places, [&](std::size_t row) {
        const std::uint32_t local = rows.servers[row];
        count_command(local);
        end_command(local);
        return !claim_result(words_.state[local], envs_[local].ticket);  // aborted: the row may belong to another worker by now
    });
    write_rows(rows, places);
    for (const std::size_t row : places) {
        const std::uint32_t local = rows.servers[row];
        write_flags(local, rows, row);
        words_.fault[local].store(static_cast<std::uint32_t>(Fault::NONE), std::memory_order_relaxed);
        try {
            write_info(local, infos, row, rows.servers.size());
        } catch (nb::python_error& error) {
            write_fault(local, error.value(), "output of step");
        }
        finish(local);
    }
    flush();
}

ExternalPoolLoop::Servers ExternalPoolLoop::parse_servers(nb::handle servers) const {
    const nb::object array = checked(PyArray_FROM_OTF(servers.ptr(), NPY_INT64, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    const auto num = static_cast<std::size_t>(PyArray_SIZE(reinterpret_cast<PyArrayObject*>(array.ptr())));
    Servers parsed;
    for (std::size_t i = 0; i < num; ++i) {
        const std::int64_t server = items<std::int64_t>(array)[i];
        if (server < 0 || server >= static_cast<std::int64_t>(envs_.size())) throw std::out_of_range("the external pool returned a result for env " + std::to_string(server) + ", which does not exist");
        parsed.push_back(static_cast<std::uint32_t>(server));
    }
    return parsed;
}

// Checks and converts everything before a byte is written.
void ExternalPoolLoop::read_rows(Rows& rows, nb::handle obs, nb::handle reward, nb::handle terminated, nb::handle truncated) const {
    const std::size_t num = rows.servers.size();
    rows.leaves.resize(obs_.leaves.size());
    auto read = [&](const Node& node, PyObject* value) {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        nb::object array = nb::steal(new_array(leaf, static_cast<npy_intp>(num)));
        if (!array) return false;
        auto* target = static_cast<std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
        const bool is_ready = PyArray_Check(value) && PyArray_TYPE(reinterpret_cast<PyArrayObject*>(value)) == leaf.type_num && leaf.is_native &&
                              PyArray_ISCARRAY_RO(reinterpret_cast<PyArrayObject*>(value)) &&
                              PyArray_SAMESHAPE(reinterpret_cast<PyArrayObject*>(value), reinterpret_cast<PyArrayObject*>(array.ptr()));
        if (!is_ready && !write_leaf(leaf, value, target, static_cast<npy_intp>(num))) return false;
        rows.leaves[index] = is_ready ? nb::borrow(value) : array;
        return true;
    };
    if (!visit_tree(obs_.root, obs.ptr(), read, [](const Node&, PyObject*) { return false; })) throw nb::python_error();
    if (reward.is_none()) return;
    rows.reward = flat_array(reward, NPY_DOUBLE, num, "reward");
    rows.terminated = flat_array(terminated, NPY_BOOL, num, "terminated");
    rows.truncated = flat_array(truncated, NPY_BOOL, num, "truncated");
}

void ExternalPoolLoop::count_command(std::uint32_t local) {
    add_to(envs_[local].is_reset ? control_->num_resets : control_->num_steps, 1);
}

// ---- SAME_STEP: what ended waits for its reset ----------------------------------------------------------------------

bool ExternalPoolLoop::needs_reset_first(std::uint32_t local, const Rows& rows, std::size_t row) {
    const ExternalEnv& env = envs_[local];
    return autoreset_ == Autoreset::SAME_STEP && !env.is_reset && !env.awaits_reset && rows.is_end(row);
}

void ExternalPoolLoop::hold_for_reset(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos) {
    ExternalEnv& env = envs_[local];
    env.awaits_reset = true;
    env.final_reward = items<double>(rows.reward)[row];
    env.final_terminated = items<npy_bool>(rows.terminated)[row] != 0;
    env.final_truncated = items<npy_bool>(rows.truncated)[row] != 0;
    const nb::object info = infos.is_none() ? nb::object(nb::dict()) : info_row(infos, row, rows.servers.size());
    env.final_info.clear();
    if (!encoder_.encode(info.ptr(), env.final_info, {"info"})) throw nb::python_error();
    env.final_obs.clear();
    for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
        const std::byte* value = rows.value(obs_.leaves[index], index, row);
        env.final_obs.insert(env.final_obs.end(), value, value + obs_.leaves[index].row_bytes);
    }
}

void ExternalPoolLoop::write_final(std::uint32_t local) {
    const std::byte* value = envs_[local].final_obs.data();
    for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
        const std::size_t bytes = obs_.leaves[index].row_bytes;
        std::memcpy(slab_->base + final_columns_[index].at(0, words_.row[local]), value, bytes);
        value += bytes;
    }
    words_.result[local] |= RESULT_FINAL;
}

// ---- bytes ----------------------------------------------------------------------------------------------------------

// Copies runs of rows that are adjacent in the source, the slab and the slot with one memcpy: usually all rows.
void ExternalPoolLoop::write_rows(const Rows& rows, const std::vector<std::size_t>& places) {
    std::size_t begin = 0;
    while (begin < places.size()) {
        const std::size_t place = places[begin];
        const std::uint32_t row = words_.row[rows.servers[place]];
        const std::uint8_t slot = words_.slot[rows.servers[place]];
        std::size_t num = 1;
        auto follows = [&] {
            if (begin + num == places.size() || places[begin + num] != place + num) return false;
            const std::uint32_t next = rows.servers[place + num];
            return words_.row[next] == row + num && words_.slot[next] == slot;
        };
        while (follows()) ++num;
        for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
            const Leaf& leaf = obs_.leaves[index];
            std::memcpy(slab_->base + leaf.column.at(slot, row), rows.value(leaf, index, place), leaf.row_bytes * num);
        }
        begin += num;
    }
}

void ExternalPoolLoop::write_flags(std::uint32_t local, const Rows& rows, std::size_t row) {
    ExternalEnv& env = envs_[local];
    const std::uint32_t at = words_.row[local];
    const bool is_stepped = !env.is_reset && !env.awaits_reset && rows.reward;
    words_.clear_result(local);
    const double reward = env.awaits_reset ? env.final_reward : is_stepped ? items<double>(rows.reward)[row] : 0.0;
    std::memcpy(slab_->reward(at), &reward, sizeof reward);
    *slab_->terminated(at) = env.awaits_reset ? env.final_terminated : is_stepped && items<npy_bool>(rows.terminated)[row];
    *slab_->truncated(at) = env.awaits_reset ? env.final_truncated : is_stepped && items<npy_bool>(rows.truncated)[row];
    const bool is_end = *slab_->terminated(at) || *slab_->truncated(at);
    *slab_->over(at) = is_end;
    if (env.is_reset || env.needs_reset) {
        env.episode_return = 0.0, env.episode_length = 0;
        if (autoreset_ != Autoreset::SAME_STEP) slab_->clear_episode(at);
    } else {
        env.episode_return += reward;
        ++env.episode_length;
        *slab_->episode_return(at) = env.episode_return;
        *slab_->episode_length(at) = env.episode_length;
        if (is_end) env.episode_return = 0.0, env.episode_length = 0;
    }
    if (env.awaits_reset) write_final(local);
    env.needs_reset = is_end && autoreset_ == Autoreset::NEXT_STEP;
}

void ExternalPoolLoop::write_info(std::uint32_t local, nb::handle infos, std::size_t row, std::size_t num_rows) {
    ExternalEnv& env = envs_[local];
    const bool has_info = !infos.is_none() && nb::len(infos) != 0;
    if (!has_info && !env.awaits_reset) return;
    const nb::object info = has_info ? info_row(infos, row, num_rows) : nb::object(nb::dict());
    buffer_.clear();
    if (!encoder_.encode(info.ptr(), buffer_, {"info"})) throw nb::python_error();
    if (env.awaits_reset) buffer_.insert(buffer_.end(), env.final_info.begin(), env.final_info.end());
    if (!payloads_.write(local, buffer_)) throw nb::python_error();
    env.awaits_reset = false;
}

}  // namespace stepmill
