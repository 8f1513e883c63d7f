// What a batch says beside its arrays: payloads, last observations, finished episodes.
#define NO_IMPORT_ARRAY
#include "columns.hpp"
#include "walks.hpp"

namespace stepmill {

// An env's payload, in memory that no worker can reach: valid until the next one is fetched.
std::span<const std::uint8_t> Ledger::fetch_payload(std::uint32_t env_id) {
    const Seat seat = slab_->seats[envs_[env_id].server];
    const ServerWords& words = slab_->words[seat.worker];
    const std::uint64_t bytes = words.payload_bytes[seat.local];
    if (!(words.result[seat.local] & RESULT_REMOTE)) {
        const auto* row = reinterpret_cast<const std::uint8_t*>(slab_->payload(result_row(env_id)));
        buffer_.assign(row, row + std::min<std::uint64_t>(bytes, slab_->plan.payload.row_bytes));
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

// Parts of no fixed size are needed at once.
nb::object Ledger::decode_payload(std::uint32_t id) {
    // Taken out of the ledger meanwhile: unpickling runs code of others, which may come back here.
    fetch_payload(id);
    std::vector<std::uint8_t> bytes = std::move(buffer_);
    nb::object payload = nb::steal(decode(bytes.data(), bytes.size(), unpickler_.ptr()));
    buffer_ = std::move(bytes);
    if (!payload) throw nb::python_error();
    const Seat seat = slab_->seats[envs_[id].server];
    const bool has_final = (slab_->words[seat.worker].result[seat.local] & RESULT_FINAL) != 0;
    auto has_all = [&](PyObject* opaques) { return PyList_CheckExact(opaques) && PyList_GET_SIZE(opaques) == obs_.num_opaques; };
    PyObject* parts = payload.ptr();
    const bool is_whole = PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 4 && has_all(PyTuple_GET_ITEM(parts, 2)) &&
                          (!has_final || has_all(PyTuple_GET_ITEM(parts, 3)));
    if (is_whole) return payload;
    raise(errors().bug, "the observation of env " + std::to_string(id) + " cannot be read back; its worker wrote outside its memory");
}

// What a payload that cannot be read becomes: a fault of its env, so that the others stay receivable.
nb::object Ledger::take_payload(std::uint32_t id) {
    try {
        return obs_.num_opaques != 0 ? decode_payload(id) : read_payload(id);
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_Exception)) {
            const Seat seat = slab_->seats[envs_[id].server];
            slab_->words[seat.worker].payload_bytes[seat.local] = 0;
            slab_->words[seat.worker].fault[seat.local].store(static_cast<std::uint32_t>(Fault::BAD_OUTPUT), std::memory_order_relaxed);
            scanned_ = 0;
        }
        throw;
    }
}

// payloads: (row, bytes), or (row, decoded) where observations have opaque leaves. finals: (row, observation).
// Rows count within the batch, or within all envs if is_by_env.
void Ledger::gather_payloads(const Ids& ids, nb::list& payloads, nb::list& finals, bool is_by_env) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t id = ids[i];
        const Seat seat = slab_->seats[envs_[id].server];
        const ServerWords& words = slab_->words[seat.worker];
        EnvBook& env = envs_[id];
        if (env.is_masked) continue;
        const bool is_cut = static_cast<bool>(env.fault_info);  // cut short: only SAME_STEP has a result of its own, a reset's
        const bool has_result = !is_cut || env.final_obs;
        const bool is_final = has_result && !is_cut && (words.result[seat.local] & RESULT_FINAL) != 0;
        const std::size_t row = (is_by_env ? id : i) * batch_size_;
        nb::object payload;
        if (has_result && words.payload_bytes[seat.local] != 0) {
            payload = take_payload(id);
            if (obs_.num_opaques != 0) envs_[id].opaques = payload[2];
        }
        if (payload || is_cut) payloads.append(nb::make_tuple(row, payload ? payload : nb::none(), is_cut ? env.fault_info : nb::none()));
        if (is_cut && env.final_obs) finals.append(nb::make_tuple(row, env.final_obs));
        if (is_final) finals.append(nb::make_tuple(row, env_obs(id, payload && obs_.num_opaques != 0 ? nb::object(payload[3]) : nb::none(), true)));
    }
}

// (returns, lengths, which of them ended) if an episode ended in this batch, else None.
nb::object Ledger::episodes(const Ids& ids) const {
    bool is_any = false;
    for (const std::uint32_t id : ids) {
        for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) is_any |= *slab_->over(row) != 0;
    }
    if (!is_any) return nb::none();
    return nb::make_tuple(gather_rows(episode_return_, ids), gather_rows(episode_length_, ids), gather_rows(over_, ids));
}

// The parts of the info that have a fixed shape, as arrays in a fresh dict.
nb::object Ledger::fixed_info(const Ids& ids) const {
    if (info_.leaves.empty()) return checked(PyDict_New());
    auto make_leaf = [&](const Node& node) { return gather_rows(info_.leaves[static_cast<std::size_t>(node.index)], ids).release().ptr(); };
    return checked(build_tree(info_.root, make_leaf, [](const Node&) -> PyObject* { return nullptr; }));
}

nb::object Ledger::gather_info(const Ids& ids, const nb::list& payloads, const nb::list& finals) {
    const nb::object ended = has_episodes_ ? episodes(ids) : nb::none();
    const nb::object fixed = fixed_info(ids);
    if (PyList_GET_SIZE(payloads.ptr()) == 0 && PyList_GET_SIZE(finals.ptr()) == 0 && ended.is_none()) return fixed;
    nb::object env_ids = nb::none();  // of each row, where it is not the row's own number
    if (!is_all(ids) || batch_size_ > 1) env_ids = row_ids(ids);
    return make_info_(payloads, finals, ended, ids.size() * batch_size_, env_ids, fixed);
}

}  // namespace stepmill
