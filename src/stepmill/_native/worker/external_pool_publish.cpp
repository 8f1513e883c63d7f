// Results of an external pool: writes rows of its arrays to the slab.
#define NO_IMPORT_ARRAY
#include <cstring>
#include <string>
#include <utility>

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

    void read_outcome(std::size_t row, Result& result) const {
        result.reward_value = reward ? items<double>(reward)[row] : 0.0;
        result.is_terminated = terminated && items<npy_bool>(terminated)[row], result.is_truncated = truncated && items<npy_bool>(truncated)[row];
        result.is_over = result.is_terminated || result.is_truncated;
    }
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
        if (!commands_[local].is_outstanding) continue;
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
        return !claim(local, envs_[local].done);  // aborted: the row may belong to another worker by now
    });
    write_rows(rows, places);
    Result scratch;
    for (const std::size_t row : places) {
        const std::uint32_t local = rows.servers[row];
        const bool is_held = std::exchange(commands_[local].awaits_reset, false);
        if (!write_row(local, rows, row, infos, is_held ? commands_[local].held : scratch)) {
            publish_fault(local, envs_[local].done, Fault::BAD_OUTPUT, "output of step", true);
            continue;
        }
        complete(local, envs_[local].done);
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
    add_to(commands_[local].is_reset ? control_->own.counters.num_resets : control_->own.counters.num_steps, 1);
}

// ---- SAME_STEP: what ended waits for its reset ----------------------------------------------------------------------

bool ExternalPoolLoop::needs_reset_first(std::uint32_t local, const Rows& rows, std::size_t row) {
    const Command& command = commands_[local];
    return autoreset_ == Autoreset::SAME_STEP && !command.is_reset && !command.awaits_reset && rows.is_end(row);
}

// Reads the row, because the reset may change the arrays.
void ExternalPoolLoop::hold_for_reset(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos) {
    Result& held = commands_[local].held = Result();
    commands_[local].awaits_reset = true;
    rows.read_outcome(row, held);
    const nb::object info = infos.is_none() ? no_info_ : info_row(infos, row, rows.servers.size());
    PyObject* objects = nullptr;
    if (!encoder_.encode(info.ptr(), held.final_info, {"info", objects_ ? &objects : nullptr})) throw nb::python_error();
    held.final_objects = nb::steal(objects);
    held.has_final = true;
    for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
        const auto* value = reinterpret_cast<const std::uint8_t*>(rows.value(obs_.leaves[index], index, row));
        held.final_obs.insert(held.final_obs.end(), value, value + obs_.leaves[index].row_bytes);
    }
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

// Writes everything of a result except its observation. A result that is not held is read into `result` first.
bool ExternalPoolLoop::write_row(std::uint32_t local, const Rows& rows, std::size_t row, nb::handle infos, Result& result) {
    words_.clear_result(local);
    if (objects_) objects_of(local).reset();
    if (!result.has_final) rows.read_outcome(row, result);
    try {
        result.info = infos.is_none() || nb::len(infos) == 0 ? no_info_ : info_row(infos, row, rows.servers.size());
    } catch (nb::python_error& error) {
        error.restore();
        return false;
    }
    return write_rest(local, words_.row[local], result, {});
}

}  // namespace stepmill
