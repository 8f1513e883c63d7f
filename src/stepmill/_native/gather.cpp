// The ledger's other half: finished rows become the batch that the user gets. Whether that is a view or a copy is decided here, once.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "columns.hpp"
#include "walks.hpp"

namespace stepmill {

// ---- what the user gets -----------------------------------------------------------------------------------------

nb::object Ledger::collect_all() { return gather(all_, {}, nullptr, false); }

// Parts the pending envs: those that are ready, at most max_envs of them and only named ones, and the rest. Kept results come first.
void Ledger::part_ready(std::uint32_t max_envs, nb::handle env_ids, Ids& ids, Ids& rest) const {
    Ids storage;
    parse_ids(env_ids, storage);
    const bool is_any = !env_ids.is_valid() || env_ids.is_none();
    for (const std::uint32_t id : kept_) {
        if (ids.size() < max_envs && (is_any || is_named_[id]) && !envs_[id].replay) ids.push_back(id);
    }
    for (const std::uint32_t id : pending_) {
        const bool is_taken = ids.size() < max_envs && (is_any || is_named_[id]) && is_done(id) && !has_fault(id);
        (is_taken ? ids : rest).push_back(id);
    }
}

nb::object Ledger::collect(std::uint32_t max_envs, nb::handle out, nb::handle env_ids) {
    const InUse in_use(*this);
    Ids ids, rest;
    part_ready(max_envs, env_ids, ids, rest);
    const bool is_whole = ids.size() == num_envs_ && std::is_sorted(ids.begin(), ids.end());
    const Ids& taken = is_whole ? all_ : ids;
    std::vector<nb::object> outs;
    const bool has_out = out.is_valid() && !out.is_none();
    if (has_out) outs = parse_out(taken, out);  // raises before anything is received
    return gather(taken, std::move(rest), has_out ? &outs : nullptr, true);
}

nb::object Ledger::collect_ready() {
    const InUse in_use(*this);
    bool is_fault = false;
    const auto num_pending = static_cast<std::uint32_t>(pending_.size());
    if (num_pending + num_kept_ready() != num_envs_ || scan(pending_, num_pending, is_fault) != num_pending || is_fault) return nb::none();
    return collect_all();
}

nb::object Ledger::collect_rows(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids ids, rest;
    part_ready(num_envs_, env_ids, ids, rest);
    Payloads payloads;
    if (!gather_payloads(ids, true, payloads)) return nb::none();
    receive(ids, std::move(rest), payloads);
    nb::object info = fixed_info(all_);
    if (payloads.infos) info = make_info(payloads, nb::none(), num_envs_ * batch_size_, nb::none(), info);
    const Ids everyone = all_;  // a copy: no view is handed out
    return nb::make_tuple(gather_obs(everyone, nullptr), info);
}

// Until receive() nothing has changed. What fails after it, as Ctrl-C in Python code that is called here, is made good by take_back().
nb::object Ledger::gather(const Ids& ids, Ids rest, const std::vector<nb::object>* outs, bool has_ids) {
    Payloads payloads;
    if (!gather_payloads(ids, false, payloads)) return nb::none();
    receive(ids, std::move(rest), payloads);
    nb::object obs = gather_obs(ids, outs);
    nb::object reward = gather_rows(reward_, ids);
    nb::object terminated = gather_rows(terminated_, ids);
    nb::object truncated = gather_rows(truncated_, ids);
    nb::object info = gather_info(ids, payloads);
    if (!has_ids) return checked(PyTuple_Pack(5, obs.ptr(), reward.ptr(), terminated.ptr(), truncated.ptr(), info.ptr()));
    nb::object env_id = row_ids(ids);
    if (slab_->plan.outcome.num_agents != 0) {
        nb::object alive = gather_rows(alive_, ids);
        return checked(PyTuple_Pack(7, obs.ptr(), reward.ptr(), terminated.ptr(), truncated.ptr(), info.ptr(), env_id.ptr(), alive.ptr()));
    }
    return checked(PyTuple_Pack(6, obs.ptr(), reward.ptr(), terminated.ptr(), truncated.ptr(), info.ptr(), env_id.ptr()));
}

// The env that each row of a batch belongs to.
nb::object Ledger::row_ids(const Ids& ids) const {
    nb::object env_id = new_column(static_cast<npy_intp>(ids.size() * batch_size_), NPY_INT64);
    auto* target = data_of<std::int64_t>(env_id);
    for (const std::uint32_t id : ids) target = std::fill_n(target, batch_size_, id);
    return env_id;
}

nb::object Ledger::observe(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    Ids ids = parse_ids(env_ids, storage);  // a copy: no view is handed out
    return gather_obs(ids, nullptr);
}

// From here on the results are received. Python code may be interrupted wherever it runs, also on the return of a native call: what is
// needed to hand them out again is remembered, until the pool clears `unclaimed`.
void Ledger::receive(const Ids& ids, Ids rest, Payloads payloads, bool has_payloads) {
    handout_.ids = ids;
    settle(ids, std::move(rest));
    handout_.payloads = std::move(payloads);
    handout_.has_payloads = has_payloads;
    PyList_SetItem(unclaimed_.ptr(), 0, Py_NewRef(Py_True));
}

// The rows of these envs stay as they are until their next commands, and those are refused while their results are kept.
void Ledger::take_back() {
    const InUse in_use(*this);
    const Handout taken = std::exchange(handout_, Handout());
    const Ids& ids = taken.ids;
    Payloads payloads = taken.payloads;
    if (!taken.has_payloads) gather_payloads(ids, false, payloads);
    auto env_of = [&](nb::handle item) -> EnvBook& {
        const std::size_t index = nb::cast<std::size_t>(item[0]) / batch_size_;
        return envs_.at(payloads.is_by_env ? index : ids.at(index));
    };
    for (const std::uint32_t id : ids) {
        envs_[id].is_kept = true;
        kept_.push_back(id);
    }
    for (nb::handle item : payloads.infos ? payloads.infos : nb::list()) {
        env_of(item).kept_payload = checked(PyTuple_GetSlice(item.ptr(), 1, PyTuple_GET_SIZE(item.ptr())));
    }
    for (nb::handle item : payloads.finals ? payloads.finals : nb::list()) env_of(item).kept_final = item[1];
}

void Ledger::release_kept(std::uint32_t id) {
    envs_[id].is_kept = false;
    envs_[id].kept_payload.reset(), envs_[id].kept_final.reset();
    std::erase(kept_, id);
}

// Received: these envs are idle, and where their results went is where their newest result is.
void Ledger::settle(const Ids& ids, Ids rest, bool is_seen) {
    const bool is_journaled = log_limit_ != 0 && action_.num_opaques == 0 && is_all(ids) && kept_.empty();
    if (is_journaled) write_batch();  // first of all: there may be no memory
    pending_ = std::move(rest);
    scanned_ = 0;
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        if (env.is_kept) {
            release_kept(id);
            continue;
        }
        book_->unpin(env.latest);
        env.latest = env.target;
        env.status = EnvStatus::IDLE;
        if (env.is_masked) {
            env.is_masked = false;
            env.status = EnvStatus::EXHAUSTED;
            take_log(id);
            env.log.first = journal_.end() + 1;  // the batch to come says nothing of it
            continue;
        }
        if (env.is_taking) move_in(id);
        if (env.fault_info) mark_truncated(id);
        if (is_batched_ || autoreset_ == Autoreset::SAME_STEP) note_ended(id, static_cast<bool>(env.fault_info));
        if (is_journaled && autoreset_ == Autoreset::NEXT_STEP && !env.is_reset && !env.fault_info) {  // hot: one more of all
            ++env.log.length;
            is_recorded_ |= env.log.is_whole;
        } else if (tracks_episodes_) {
            note_result(id, is_journaled);
        }
        if (budget_ != 0 && is_ended(id) && ++env.num_ended >= budget_) env.status = EnvStatus::EXHAUSTED;
        if (env.fault_info) env.fault_info.reset(), env.final_obs.reset();
        if (is_seen && is_over(id)) relieve(id);
    }
    if (is_journaled) add_batch();
}

// ---- observations -----------------------------------------------------------------------------------------------

int Ledger::common_slot(const Ids& ids) const {
    const int slot = ids.empty() ? -1 : envs_[ids[0]].latest;
    for (const std::uint32_t id : ids) {
        if (envs_[id].latest != slot) return -1;
    }
    return slot;
}

nb::object Ledger::gather_obs(const Ids& ids, const std::vector<nb::object>* outs) {
    const int slot = common_slot(ids);
    nb::object lease;
    auto make_leaf = [&](const Node& node) -> PyObject* {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        const bool is_given = !form_.given[index].empty();
        if (outs == nullptr && !is_given) return wrapped(gather_leaf(leaf, ids, slot, lease));
        nb::object array = outs != nullptr ? (*outs)[index] : checked(new_array(leaf, static_cast<npy_intp>(ids.size() * batch_size_)));
        auto* target = data_of<std::byte>(array);
        is_given ? copy_given(index, ids, target) : gather_into(leaf, ids, slot, target);
        return outs != nullptr ? array.release().ptr() : wrapped(std::move(array));
    };
    if (form_.root.kind == Node::Kind::LEAF) return checked(make_leaf(form_.root));
    return checked(build_tree(form_.root, make_leaf, [&](const Node& node) { return opaque_column(ids, node.index).release().ptr(); }));
}

// What the user gets in the place of an array; a new reference, or null with an exception set.
PyObject* Ledger::wrapped(nb::object array) const {
    return form_.wrap ? PyObject_CallOneArg(form_.wrap.ptr(), array.ptr()) : array.release().ptr();
}

void Ledger::copy_given(std::size_t index, const Ids& ids, std::byte* target) const {
    const std::vector<std::byte>& rows = form_.given[index];
    const std::size_t env_bytes = obs_.leaves[index].row_bytes * batch_size_;
    if (is_all(ids)) {
        std::memcpy(target, rows.data(), rows.size());
        return;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) std::memcpy(target + i * env_bytes, rows.data() + ids[i] * env_bytes, env_bytes);
}

// program: of the same tree. given: by number of a leaf, an array of its dtype [num_rows, *shape], in C order.
void Ledger::hand_out(nb::handle program, nb::handle wrap, nb::dict given) {
    const InUse in_use(*this);
    Form form{Node::parse(program), wrap.is_none() ? nb::object() : nb::borrow(wrap), std::vector<std::vector<std::byte>>(obs_.leaves.size())};
    for (const auto& [key, value] : given) {
        const auto index = nb::cast<std::size_t>(key);
        const Leaf& leaf = obs_.leaves.at(index);
        auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
        const std::size_t size = leaf.row_bytes * batch_size_ * num_envs_;
        if (!PyArray_Check(value.ptr()) || PyArray_TYPE(array) != leaf.type_num || !PyArray_ISCARRAY_RO(array) || static_cast<std::size_t>(PyArray_NBYTES(array)) != size) {
            raise(errors().usage, "leaf " + leaf.path + " must be given as a C array of " + text_of(leaf.descr) + " with a row for each that the pool has");
        }
        const auto* bytes = data_of<std::byte>(value);
        form.given[index].assign(bytes, bytes + size);
    }
    form_ = std::move(form);
}

nb::object Ledger::gather_leaf(const Leaf& leaf, const Ids& ids, int common_slot, nb::object& lease) {
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    // Not bools: a view would show what a worker writes there, and other bytes than 0 and 1 are no bools.
    const bool is_leased = leaf.type_num != NPY_BOOL && is_all(ids) && !is_copy_ && common_slot >= static_cast<int>(slab_->plan.private_slots) &&
                           leaf.row_bytes * static_cast<std::size_t>(rows) >= lease_bytes_;
    if (is_leased) {
        const auto slot = static_cast<std::uint32_t>(common_slot);
        if (!lease) lease = nb::cast(new Lease(book_, slot), nb::rv_policy::take_ownership);
        return checked(view_array(leaf, rows, slab_->base + leaf.column.at(slot, 0), lease.ptr()));
    }
    nb::object array = checked(new_array(leaf, rows));
    gather_into(leaf, ids, common_slot, data_of<std::byte>(array));
    return array;
}

void Ledger::gather_into(const Leaf& leaf, const Ids& ids, int common_slot, std::byte* target) const {
    const std::size_t env_bytes = leaf.row_bytes * batch_size_;
    if (is_all(ids) && common_slot >= 0) {
        slab_->copy_rows(leaf.column, static_cast<std::size_t>(common_slot), target);
    } else {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            std::memcpy(target + i * env_bytes, slab_->base + leaf.column.at(envs_[ids[i]].latest, row_of(ids[i])), env_bytes);
        }
    }
    normalize_bools(leaf, target, env_bytes * ids.size());
}

// The caller's arrays, checked: one per leaf, of the batch's shape and dtype, in C order and writable.
std::vector<nb::object> Ledger::parse_out(const Ids& ids, nb::handle out) const {
    std::vector<nb::object> outs(obs_.leaves.size());
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    auto take = [&](const Node& node, PyObject* value) {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        std::vector<npy_intp> dims{rows};
        dims.insert(dims.end(), leaf.shape.begin(), leaf.shape.end());
        auto* array = reinterpret_cast<PyArrayObject*>(value);
        const bool is_good = PyArray_Check(value) && PyArray_TYPE(array) == leaf.type_num && PyArray_ISCARRAY(array) && leaf.is_native &&
                             PyArray_NDIM(array) == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), PyArray_DIMS(array));
        if (!is_good) {
            PyErr_Format(PyExc_ValueError, "leaf %s must be a writable C array of %S with %zd rows of the observation's shape", leaf.path.c_str(), leaf.descr.ptr(), rows);
            return false;
        }
        outs[index] = nb::borrow(value);
        return true;
    };
    auto refuse = [](const Node&, PyObject*) {
        PyErr_SetString(PyExc_ValueError, "observations without a fixed size cannot be written in place");
        return false;
    };
    if (walk_tree(obs_.root, out.ptr(), take, refuse)) return outs;
    nb::python_error cause;
    const std::string text = "out does not fit this batch: " + text_of(cause.value());
    PyErr_SetString(errors().usage.ptr(), text.c_str());
    throw nb::python_error();
}

nb::object Ledger::opaque_column(const Ids& ids, int index) const {
    nb::list column;
    for (const std::uint32_t id : ids) {
        const nb::object& opaques = envs_[id].opaques;
        nb::object item = opaques ? nb::object(opaques[index]) : nb::none();
        if (is_batched_ && opaques) column.extend(item);
        else column.append(item);
    }
    return checked(PyList_AsTuple(column.ptr()));
}

// One env's observation, as it gave it: the newest received, or the last of an episode that ended under SAME_STEP.
nb::object Ledger::env_obs(std::uint32_t env_id, nb::handle opaques, bool is_final) {
    const std::uint32_t row = row_of(env_id);
    const npy_intp rows = is_batched_ ? static_cast<npy_intp>(batch_size_) : -1;
    auto make_leaf = [&](const Node& node) -> PyObject* {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        std::byte* source = slab_->base + (is_final ? slab_->plan.final_observation[index].at(0, row) : leaf.column.at(envs_[env_id].latest, row));
        if (rows < 0 && leaf.shape.empty()) return PyArray_Scalar(source, leaf.dtype(), nullptr);
        nb::object array = checked(new_array(leaf, rows));
        const std::size_t size = leaf.row_bytes * (is_batched_ ? batch_size_ : 1);
        std::memcpy(data_of<std::byte>(array), source, size);
        normalize_bools(leaf, data_of<std::byte>(array), size);
        return array.release().ptr();
    };
    auto make_opaque = [&](const Node& node) {
        const bool has_value = opaques.is_valid() && !opaques.is_none();
        return (has_value ? nb::object(opaques[node.index]) : nb::none()).release().ptr();
    };
    return checked(build_tree(obs_.root, make_leaf, make_opaque));
}

}  // namespace stepmill
