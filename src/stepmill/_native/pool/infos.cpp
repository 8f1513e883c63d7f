// What a batch contains besides its arrays: payloads, last observations, sums of finished episodes.
#define NO_IMPORT_ARRAY
#include "codec/payload_writer.hpp"
#include "pool/columns.hpp"
#include "shared/tree_visit.hpp"

namespace stepmill {

namespace {

constexpr const char* OVERWRITTEN = "its memory was overwritten, by its worker or by native code in one of the worker's envs";

}  // namespace

nb::bytes PoolState::read_payload(std::uint32_t env_id) {
    if (!read_payload_bytes(*slab_, slab_->server_locations[envs_[env_id].server], result_row(env_id), buffer_)) raise(errors().bug, OVERWRITTEN);
    return nb::bytes(buffer_.data(), buffer_.size());
}

nb::object PoolState::objects_of(std::uint32_t env_id) const {
    const nb::object& objects = objects_->of(envs_[env_id].server);
    return objects ? objects : nb::none();
}

// Decodes the opaque parts of an env's observations, and separates the info, which stays encoded. Returns false if the payload is
// unreadable; the env then has a fault. Other exceptions, for example KeyboardInterrupt, are thrown and change nothing.
bool PoolState::read_opaques(std::uint32_t id, OpaquePayload& payload) {
    const auto [words, local] = slab_->server_words(envs_[id].server);
    try {
        const nb::object objects = objects_of(id);
        const nb::bytes bytes = read_payload(id);  // a copy: the unpickler may run user code that fetches another payload
        std::size_t used = 0;
        const auto* data = static_cast<const std::uint8_t*>(bytes.data());
        const nb::object both = checked(decode_values(data, bytes.size(), 2, {unpickler_.ptr(), objects.ptr()}, used));
        const bool has_final = (words.result[local] & RESULT_FINAL) != 0;
        auto has_all = [&](std::size_t place) {
            const nb::object opaques = nb::len(both) > place ? nb::object(both[place]) : nb::none();
            return PyList_CheckExact(opaques.ptr()) && PyList_GET_SIZE(opaques.ptr()) == obs_.num_opaques;
        };
        if (!has_all(0) || (has_final && !has_all(1))) raise(errors().bug, OVERWRITTEN);
        payload.opaques = both[0];
        payload.final_opaques = both[1];
        payload.info = bytes.size() == used ? nb::object() : nb::object(nb::bytes(data + used, bytes.size() - used));
        return true;
    } catch (nb::python_error& error) {
        envs_[id].fault_record = describe_unreadable_(error.value());  // raises again what is not a fault of the env
        envs_[id].recorded_ticket = *envs_[id].ticket;
    }
    words.payload_bytes[local] = 0;
    words.fault[local].store(static_cast<std::uint32_t>(Fault::BAD_OUTPUT), std::memory_order_relaxed);
    scanned_ = 0;
    return false;
}

// Gathers the payloads of these envs without receiving them. Returns false if an env's payload is unreadable; it then has a fault.
bool PoolState::gather_payloads(const Ids& ids, bool is_by_env, Payloads& payloads) {
    payloads.is_by_env = is_by_env;
    auto append = [](nb::object& list, nb::object item) {
        if (!list) list = nb::list();
        nb::borrow<nb::list>(list).append(item);
    };
    std::vector<std::pair<std::uint32_t, nb::object>> opaques;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t id = ids[i];
        const auto [words, local] = slab_->server_words(envs_[id].server);
        EnvRecord& env = envs_[id];
        if (env.is_masked()) continue;
        const std::size_t row = (is_by_env ? id : i) * batch_size_;
        if (unclaimed_.is_unclaimed(id)) {
            if (unclaimed_.payload(id)) append(payloads.infos, nb::make_tuple(row) + unclaimed_.payload(id));
            if (unclaimed_.final_obs(id)) append(payloads.finals, nb::make_tuple(row, unclaimed_.final_obs(id)));
            continue;
        }
        const bool is_cut = env.is_cut();
        const bool has_result = !is_cut || is_reset_after_cut(env);
        const bool is_final = has_result && !is_cut && (words.result[local] & RESULT_FINAL) != 0;
        OpaquePayload payload;
        if (has_result && words.payload_bytes[local] != 0) {
            if (obs_.num_opaques == 0) {
                payload.info = read_info(id);
            } else if (!read_opaques(id, payload)) {
                return false;
            } else {
                opaques.emplace_back(id, payload.opaques);
            }
        }
        if (payload.info || is_cut) {
            append(payloads.infos, nb::make_tuple(row, payload.info ? payload.info : nb::none(), is_cut ? env.cut_info : nb::none(), objects_of(id)));
        }
        if (is_cut && env.final_obs) append(payloads.finals, nb::make_tuple(row, env.final_obs));
        if (is_final) append(payloads.finals, nb::make_tuple(row, env_obs(id, payload.final_opaques, true)));
    }
    for (auto& [id, newest] : opaques) envs_[id].opaques = std::move(newest);
    return true;
}

// Returns the payload as bytes, or a str that explains why it cannot be read.
nb::object PoolState::read_info(std::uint32_t id) {
    try {
        return read_payload(id);
    } catch (nb::python_error& error) {
        if (!error.matches(errors().bug)) throw;
        return nb::str(OVERWRITTEN);
    }
}

// Returns (returns, lengths, which rows ended) if an episode ended in this batch, else None.
nb::object PoolState::episodes(const Ids& ids) const {
    bool is_any = false;
    for (const std::uint32_t id : ids) {
        for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) is_any |= *slab_->over(row) != 0;
    }
    if (!is_any) return nb::none();
    return nb::make_tuple(gather_rows(episode_return_, ids), gather_rows(episode_length_, ids), gather_rows(over_, ids));
}

// Returns the parts of the info with a fixed shape, as arrays in a new dict.
nb::object PoolState::fixed_info(const Ids& ids) const {
    if (info_.leaves.empty()) return checked(PyDict_New());
    auto make_leaf = [&](const Node& node) { return gather_rows(info_.leaves[static_cast<std::size_t>(node.index)], ids).release().ptr(); };
    return checked(build_tree(info_.root, make_leaf, [](const Node&) -> PyObject* { return nullptr; }));
}

nb::object PoolState::make_info(const Payloads& payloads, nb::handle ended, std::size_t num_rows, nb::handle env_ids, nb::handle fixed) const {
    return make_info_(payloads.infos ? payloads.infos : nb::list(), payloads.finals ? payloads.finals : nb::list(), ended, num_rows, env_ids, fixed);
}

nb::object PoolState::gather_info(const Ids& ids, const Payloads& payloads) {
    const nb::object ended = has_episodes_ ? episodes(ids) : nb::none();
    const nb::object fixed = fixed_info(ids);
    if (!payloads.infos && !payloads.finals && ended.is_none()) return fixed;
    nb::object env_ids = nb::none();  // of each row; None: the row numbers are the env ids
    if (!is_all(ids) || batch_size_ > 1) env_ids = row_ids(ids);
    return make_info(payloads, ended, ids.size() * batch_size_, env_ids, fixed);
}

}  // namespace stepmill
