// The ledger's other half: finished rows become the batch that the user gets. Whether that is a view or a copy is decided here, once.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "ledger.hpp"

namespace stepmill {

namespace {

// A fresh C array of `rows` items of a builtin type.
nb::object new_column(npy_intp rows, int type_num) {
    nb::object array = nb::steal(PyArray_SimpleNew(1, &rows, type_num));
    if (!array) throw nb::python_error();
    return array;
}

template <typename Item>
Item* data_of(nb::handle array) {
    return static_cast<Item*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

nb::object checked(PyObject* fresh) {
    if (fresh == nullptr) throw nb::python_error();
    return nb::steal(fresh);
}

}  // namespace

// ---- what the user gets -----------------------------------------------------------------------------------------

nb::object Ledger::collect_all() { return gather(all_, {}, nullptr, false); }

// Parts the pending envs: those that are ready, at most max_envs of them and only named ones, and the rest.
void Ledger::part_ready(std::uint32_t max_envs, nb::handle env_ids, Ids& ids, Ids& rest) const {
    Ids storage;
    parse_ids(env_ids, storage);
    const bool is_any = !env_ids.is_valid() || env_ids.is_none();
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
    if (pending_.size() != num_envs_ || scan(pending_, num_envs_, is_fault) != num_envs_ || is_fault) return nb::none();
    return collect_all();
}

nb::object Ledger::collect_rows(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids ids, rest;
    part_ready(num_envs_, env_ids, ids, rest);
    nb::list payloads, finals;
    gather_payloads(ids, payloads, finals, true);
    settle(ids, std::move(rest));
    nb::object info = checked(PyDict_New());
    if (nb::len(payloads) != 0) info = make_info_(payloads, finals, nb::none(), nb::none(), num_envs_ * batch_size_, nb::none());
    const Ids everyone = all_;  // a copy: no view is handed out
    return nb::make_tuple(gather_obs(everyone, nullptr), info);
}

// What may fail comes first: until settle() nothing is received.
nb::object Ledger::gather(const Ids& ids, Ids rest, const std::vector<nb::object>* outs, bool has_ids) {
    nb::list payloads, finals;
    gather_payloads(ids, payloads, finals, false);
    settle(ids, std::move(rest));
    nb::object obs = gather_obs(ids, outs);
    nb::object reward = gather_column(ids, slab_->reward(), NPY_DOUBLE);
    nb::object terminated = gather_column(ids, slab_->terminated(), NPY_BOOL);
    nb::object truncated = gather_column(ids, slab_->truncated(), NPY_BOOL);
    nb::object info = gather_info(ids, payloads, finals);
    if (!has_ids) return checked(PyTuple_Pack(5, obs.ptr(), reward.ptr(), terminated.ptr(), truncated.ptr(), info.ptr()));
    nb::object env_id = row_ids(ids);
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

// Received: these envs are idle, and where their results went is where their newest result is.
void Ledger::settle(const Ids& ids, Ids rest) {
    pending_ = std::move(rest);
    scanned_ = 0;
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        book_->unpin(env.latest);
        env.latest = env.target;
        env.status = EnvStatus::IDLE;
        if (env.fault_info) mark_truncated(id);
        if (tracks_episodes_) note_result(id);
        env.fault_info.reset(), env.final_obs.reset();
    }
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
    auto make_leaf = [&](const Node& node) {
        const auto index = static_cast<std::size_t>(node.index);
        if (outs == nullptr) return gather_leaf(obs_.leaves[index], ids, slot, lease).release().ptr();
        gather_into(obs_.leaves[index], ids, slot, data_of<std::byte>((*outs)[index]));
        return nb::object((*outs)[index]).release().ptr();
    };
    if (obs_.root.kind == Node::Kind::LEAF) return checked(make_leaf(obs_.root));
    return checked(build_tree(obs_.root, make_leaf, [&](const Node& node) { return opaque_column(ids, node.index).release().ptr(); }));
}

nb::object Ledger::gather_leaf(const Leaf& leaf, const Ids& ids, int common_slot, nb::object& lease) {
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    const bool is_leased = is_all(ids) && !is_copy_ && common_slot >= static_cast<int>(slab_->plan.private_slots) &&
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
        std::memcpy(target, slab_->base + leaf.column.at(static_cast<std::size_t>(common_slot), 0), env_bytes * num_envs_);
        return;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        std::memcpy(target + i * env_bytes, slab_->base + leaf.column.at(envs_[ids[i]].latest, row_of(ids[i])), env_bytes);
    }
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
    if (walk_tree(obs_.root, out.ptr(), "", take, refuse)) return outs;
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
        std::memcpy(data_of<std::byte>(array), source, leaf.row_bytes * (is_batched_ ? batch_size_ : 1));
        return array.release().ptr();
    };
    auto make_opaque = [&](const Node& node) {
        const bool has_value = opaques.is_valid() && !opaques.is_none();
        return (has_value ? nb::object(opaques[node.index]) : nb::none()).release().ptr();
    };
    return checked(build_tree(obs_.root, make_leaf, make_opaque));
}

// ---- rewards, flags, infos --------------------------------------------------------------------------------------

template <typename Item>
nb::object Ledger::gather_column(const Ids& ids, const Item* column, int type_num) const {
    nb::object array = new_column(static_cast<npy_intp>(ids.size() * batch_size_), type_num);
    auto* target = data_of<Item>(array);
    if (is_all(ids)) {
        std::memcpy(target, column, sizeof(Item) * num_envs_ * batch_size_);
        return array;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        std::memcpy(target + i * batch_size_, column + row_of(ids[i]), sizeof(Item) * batch_size_);
    }
    return array;
}

// An env's payload, in memory that no worker can reach: valid until the next one is fetched.
std::span<const std::uint8_t> Ledger::fetch_payload(std::uint32_t env_id) {
    const Seat seat = slab_->seats[envs_[env_id].server];
    const ServerWords& words = slab_->words[seat.worker];
    const std::uint64_t bytes = words.payload_bytes[seat.local];
    if (!(words.result[seat.local] & RESULT_REMOTE)) {
        const auto* row = reinterpret_cast<const std::uint8_t*>(slab_->payload(row_of(env_id)));
        buffer_.assign(row, row + std::min<std::uint64_t>(bytes, slab_->plan.payload_row_bytes));
        return buffer_;
    }
    const OverflowRef ref{words.payload_offset[seat.local], bytes, words.payload_generation[seat.local]};
    if (!read_overflow(slab_->result_fds.at(seat.worker), ref, buffer_)) {
        const std::string text = "the info of env " + std::to_string(env_id) + " cannot be read back; its worker wrote outside its memory";
        PyErr_SetString(errors().bug.ptr(), text.c_str());
        throw nb::python_error();
    }
    return buffer_;
}

nb::object Ledger::read_payload(std::uint32_t env_id) {
    const auto bytes = fetch_payload(env_id);
    return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(bytes.data()), static_cast<Py_ssize_t>(bytes.size())));
}

// Parts of no fixed size are needed at once. What cannot be decoded is a fault of its env; the others stay receivable.
nb::object Ledger::decode_payload(std::uint32_t id) {
    // Taken out of the ledger meanwhile: unpickling runs code of others, which may come back here.
    fetch_payload(id);
    std::vector<std::uint8_t> bytes = std::move(buffer_);
    nb::object payload = nb::steal(decode(bytes.data(), bytes.size(), unpickler_.ptr()));
    buffer_ = std::move(bytes);
    if (payload) return payload;
    const Seat seat = slab_->seats[envs_[id].server];
    slab_->words[seat.worker].payload_bytes[seat.local] = 0;
    slab_->words[seat.worker].fault[seat.local].store(static_cast<std::uint32_t>(Fault::BAD_OUTPUT), std::memory_order_relaxed);
    scanned_ = 0;
    throw nb::python_error();
}

// payloads: (row, bytes), or (row, decoded) where observations have opaque leaves. finals: (row, observation).
// Rows count within the batch, or within all envs if is_by_env.
void Ledger::gather_payloads(const Ids& ids, nb::list& payloads, nb::list& finals, bool is_by_env) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t id = ids[i];
        const Seat seat = slab_->seats[envs_[id].server];
        const ServerWords& words = slab_->words[seat.worker];
        EnvBook& env = envs_[id];
        const bool is_cut = static_cast<bool>(env.fault_info);  // cut short: only SAME_STEP has a result of its own, a reset's
        const bool has_result = !is_cut || env.final_obs;
        const bool is_final = has_result && !is_cut && (words.result[seat.local] & RESULT_FINAL) != 0;
        const std::size_t row = (is_by_env ? id : i) * batch_size_;
        nb::object payload;
        if (has_result && words.payload_bytes[seat.local] != 0) {
            payload = obs_.num_opaques != 0 ? decode_payload(id) : read_payload(id);
            if (obs_.num_opaques != 0) envs_[id].opaques = payload[2];
        }
        if (payload || is_cut) payloads.append(nb::make_tuple(row, payload ? payload : nb::none(), is_cut ? env.fault_info : nb::none()));
        if (is_cut && env.final_obs) finals.append(nb::make_tuple(row, env.final_obs));
        if (is_final) finals.append(nb::make_tuple(row, env_obs(id, payload && obs_.num_opaques != 0 ? nb::object(payload[3]) : nb::none(), true)));
    }
}

nb::object Ledger::episodes(const Ids& ids) {
    const auto* terminated = slab_->terminated();
    const auto* truncated = slab_->truncated();
    bool is_any = false;
    for (const std::uint32_t id : ids) {
        for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) is_any |= (terminated[row] | truncated[row]) != 0;
    }
    if (!is_any) return nb::none();
    nb::object returns = gather_column(ids, slab_->episode_return(), NPY_DOUBLE);
    nb::object lengths = gather_column(ids, slab_->episode_length(), NPY_INT64);
    return nb::make_tuple(returns, lengths);
}

nb::object Ledger::gather_info(const Ids& ids, const nb::list& payloads, const nb::list& finals) {
    const nb::object ended = has_episodes_ ? episodes(ids) : nb::none();
    if (PyList_GET_SIZE(payloads.ptr()) == 0 && PyList_GET_SIZE(finals.ptr()) == 0 && ended.is_none()) return checked(PyDict_New());
    nb::object flags = nb::none();
    if (!ended.is_none()) flags = nb::make_tuple(gather_column(ids, slab_->terminated(), NPY_BOOL), gather_column(ids, slab_->truncated(), NPY_BOOL));
    nb::object env_ids = nb::none();  // of each row, where it is not the row's own number
    if (!is_all(ids) || batch_size_ > 1) env_ids = row_ids(ids);
    return make_info_(payloads, finals, ended, flags, ids.size() * batch_size_, env_ids);
}

// ---- faults -----------------------------------------------------------------------------------------------------

void Ledger::mark_faulted(std::uint32_t id) {
    book_->unpin(envs_[id].target);
    envs_[id].status = EnvStatus::FAULTED;
}

nb::list Ledger::faults() {
    const InUse in_use(*this);
    nb::list faults;
    for (const std::uint32_t id : pending_) {
        if (!is_done(id) || !has_fault(id)) continue;
        const Seat seat = slab_->seats[envs_[id].server];
        const auto kind = envs_[id].fault->load(std::memory_order_relaxed);
        nb::object record = nb::none();  // the dead leave none
        if (slab_->words[seat.worker].payload_bytes[seat.local] != 0) {
            try {
                record = read_payload(id);
            } catch (nb::python_error&) {  // unreadable: the fault is told without its words
            }
        }
        faults.append(nb::make_tuple(id, kind, record));
    }
    return faults;
}

void Ledger::fail(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::PENDING && is_done(id) && has_fault(id)) mark_faulted(id);
    }
    std::erase_if(pending_, [&](std::uint32_t id) { return envs_[id].status != EnvStatus::PENDING; });
    scanned_ = 0;
}

// Drops the results of envs that are done, as if they had been received.
void Ledger::discard(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage, done, done_ids;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::PENDING && is_done(id)) done.push_back(id);
    }
    for (const std::uint32_t id : done) {
        if (has_fault(id)) mark_faulted(id);
        else done_ids.push_back(id);
    }
    Ids rest = pending_;
    std::erase_if(rest, [&](std::uint32_t id) { return envs_[id].status != EnvStatus::PENDING || std::ranges::count(done_ids, id) != 0; });
    settle(done_ids, std::move(rest));
}

}  // namespace stepmill
