// What a batch says beside its arrays: payloads, last observations, finished episodes.
#define NO_IMPORT_ARRAY
#include "columns.hpp"
#include "walks.hpp"

namespace stepmill {

namespace {

constexpr const char* WRITTEN_OVER = "its memory was overwritten, by its worker or by native code in one of the worker's envs";

}  // namespace

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
        raise(errors().bug, WRITTEN_OVER);
    }
    return buffer_;
}

nb::bytes Ledger::read_payload(std::uint32_t env_id) {
    const auto bytes = fetch_payload(env_id);
    return nb::bytes(bytes.data(), bytes.size());
}

nb::object Ledger::objects_of(std::uint32_t env_id) const {
    const nb::object& objects = objects_->of(envs_[env_id].server);
    return objects ? objects : nb::none();
}

// The parts of an env's observations that have no fixed size are needed at once, unlike its info: what follows them. False: they cannot
// be read, and the env has a fault. Whatever came in the middle, as Ctrl-C, is thrown, and nothing has changed.
bool Ledger::read_opaques(std::uint32_t id, OpaquePayload& payload) {
    const Seat seat = slab_->seats[envs_[id].server];
    const nb::object objects = objects_of(id);
    nb::bytes bytes;
    try {
        bytes = read_payload(id);  // taken out of the ledger: unpickling runs code of others
        std::size_t used = 0;
        const auto* data = static_cast<const std::uint8_t*>(bytes.data());
        const nb::object both = nb::steal(decode_values(data, bytes.size(), 2, {unpickler_.ptr(), objects.ptr()}, used));
        if (!both) throw nb::python_error();
        const bool has_final = (slab_->words[seat.worker].result[seat.local] & RESULT_FINAL) != 0;
        auto has_all = [&](std::size_t place) {
            const nb::object opaques = nb::len(both) > place ? nb::object(both[place]) : nb::none();
            return PyList_CheckExact(opaques.ptr()) && PyList_GET_SIZE(opaques.ptr()) == obs_.num_opaques;
        };
        if (!has_all(0) || (has_final && !has_all(1))) raise(errors().bug, WRITTEN_OVER);
        payload.opaques = both[0];
        payload.final_opaques = both[1];
        payload.info = bytes.size() == used ? nb::object() : nb::object(nb::bytes(data + used, bytes.size() - used));
        return true;
    } catch (nb::python_error& error) {
        envs_[id].fault_record = describe_unreadable_(error.value(), bytes, objects);  // raises what is no fault of the env
        envs_[id].recorded_ticket = envs_[id].ticket;
    }
    slab_->words[seat.worker].payload_bytes[seat.local] = 0;
    slab_->words[seat.worker].fault[seat.local].store(static_cast<std::uint32_t>(Fault::BAD_OUTPUT), std::memory_order_relaxed);
    scanned_ = 0;
    return false;
}

// What the results of these envs say beside arrays. Nothing is received by that. False: an env has a fault that was found here.
bool Ledger::gather_payloads(const Ids& ids, bool is_by_env, Payloads& payloads) {
    payloads.is_by_env = is_by_env;
    auto append = [](nb::object& list, nb::object item) {
        if (!list) list = nb::list();
        nb::borrow<nb::list>(list).append(item);
    };
    std::vector<std::pair<std::uint32_t, nb::object>> opaques;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t id = ids[i];
        const Seat seat = slab_->seats[envs_[id].server];
        const ServerWords& words = slab_->words[seat.worker];
        EnvBook& env = envs_[id];
        if (env.is_masked) continue;
        const std::size_t row = (is_by_env ? id : i) * batch_size_;
        if (env.is_kept) {
            if (env.kept_payload) append(payloads.infos, nb::make_tuple(row) + env.kept_payload);
            if (env.kept_final) append(payloads.finals, nb::make_tuple(row, env.kept_final));
            continue;
        }
        const bool is_cut = static_cast<bool>(env.fault_info);  // cut short: only SAME_STEP has a result of its own, a reset's
        const bool has_result = !is_cut || env.final_obs;
        const bool is_final = has_result && !is_cut && (words.result[seat.local] & RESULT_FINAL) != 0;
        OpaquePayload payload;
        if (has_result && words.payload_bytes[seat.local] != 0) {
            if (obs_.num_opaques == 0) {
                payload.info = read_info(id);
            } else if (!read_opaques(id, payload)) {
                return false;
            } else {
                opaques.emplace_back(id, payload.opaques);
            }
        }
        if (payload.info || is_cut) {
            append(payloads.infos, nb::make_tuple(row, payload.info ? payload.info : nb::none(), is_cut ? env.fault_info : nb::none(), objects_of(id)));
        }
        if (is_cut && env.final_obs) append(payloads.finals, nb::make_tuple(row, env.final_obs));
        if (is_final) append(payloads.finals, nb::make_tuple(row, env_obs(id, payload.final_opaques, true)));
    }
    for (auto& [id, newest] : opaques) envs_[id].opaques = std::move(newest);
    return true;
}

// As bytes; or as a str that says why it cannot be read.
nb::object Ledger::read_info(std::uint32_t id) {
    try {
        return read_payload(id);
    } catch (nb::python_error& error) {
        if (!error.matches(errors().bug)) throw;
        return nb::str(WRITTEN_OVER);
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

nb::object Ledger::make_info(const Payloads& payloads, nb::handle ended, std::size_t num_rows, nb::handle env_ids, nb::handle fixed) const {
    return make_info_(payloads.infos ? payloads.infos : nb::list(), payloads.finals ? payloads.finals : nb::list(), ended, num_rows, env_ids, fixed);
}

nb::object Ledger::gather_info(const Ids& ids, const Payloads& payloads) {
    const nb::object ended = has_episodes_ ? episodes(ids) : nb::none();
    const nb::object fixed = fixed_info(ids);
    if (!payloads.infos && !payloads.finals && ended.is_none()) return fixed;
    nb::object env_ids = nb::none();  // of each row, where it is not the row's own number
    if (!is_all(ids) || batch_size_ > 1) env_ids = row_ids(ids);
    return make_info(payloads, ended, ids.size() * batch_size_, env_ids, fixed);
}

}  // namespace stepmill
