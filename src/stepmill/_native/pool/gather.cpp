// Turns finished rows into the batch that the user receives. Only this file chooses between a view and a copy.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "pool/columns.hpp"
#include "shared/tree_visit.hpp"

namespace stepmill {

// ---- what the user gets -----------------------------------------------------------------------------------------

nb::object PoolState::collect_all() { return gather(all_, {}, nullptr, false); }

// Splits the pending envs into `ids`, the ready ones (at most max_envs, only those in env_ids), and the `rest`. Unclaimed results come
// first; named envs are in the order of their ids.
void PoolState::split_ready(std::uint32_t max_envs, nb::handle env_ids, Ids& ids, Ids& rest) const {
    Ids storage;
    parse_ids(env_ids, storage);
    const bool is_any = !env_ids.is_valid() || env_ids.is_none();
    for (const std::uint32_t id : unclaimed_.ids()) {
        if (ids.size() < max_envs && (is_any || is_named_[id]) && !envs_[id].is_suspended()) ids.push_back(id);
    }
    for (const std::uint32_t id : pending_) {
        const bool is_chosen = ids.size() < max_envs && (is_any || is_named_[id]) && is_done(id) && !has_fault(id);
        (is_chosen ? ids : rest).push_back(id);
    }
    if (!is_any) std::sort(ids.begin(), ids.end());
}

nb::object PoolState::collect(std::uint32_t max_envs, nb::handle out, nb::handle env_ids) {
    const InUse in_use(*this);
    Ids ids, rest;
    split_ready(max_envs, env_ids, ids, rest);
    const bool is_whole = ids.size() == num_envs_ && std::is_sorted(ids.begin(), ids.end());
    const Ids& chosen = is_whole ? all_ : ids;
    std::vector<nb::object> outs;
    const bool has_out = out.is_valid() && !out.is_none();
    if (has_out) outs = parse_out(chosen, out);  // raises before anything is received
    return gather(chosen, std::move(rest), has_out ? &outs : nullptr, true);
}

nb::object PoolState::collect_ready() {
    const InUse in_use(*this);
    bool is_fault = false;
    const auto num_pending = static_cast<std::uint32_t>(pending_.size());
    if (num_pending + num_unclaimed_ready() != num_envs_ || scan(pending_, num_pending, is_fault) != num_pending || is_fault) return nb::none();
    return collect_all();
}

nb::object PoolState::collect_rows(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids ids, rest;
    split_ready(num_envs_, env_ids, ids, rest);
    Payloads payloads;
    if (!gather_payloads(ids, true, payloads)) return nb::none();
    receive(ids, std::move(rest), payloads);
    nb::object info = fixed_info(all_);
    if (payloads.infos) info = make_info(payloads, nb::none(), num_envs_ * batch_size_, nb::none(), info);
    const Ids everyone = all_;  // another vector than all_, so that the batch has no views
    return nb::make_tuple(gather_obs(everyone, nullptr), info);
}

// Nothing has changed before receive(). If a later line fails, for example by Ctrl-C in a callback, restore_unclaimed() repairs it.
nb::object PoolState::gather(const Ids& ids, Ids rest, const std::vector<nb::object>* outs, bool has_ids) {
    LearnerCounters& counters = slab_->pool->own.counters;
    const SampledTime timed(gather_sampler_, counters.gather_ns, unclaimed_time_, TraceKind::GATHER, slab_->learner_trace());
    add_to(counters.num_batches, 1);
    Payloads payloads;
    if (!gather_payloads(ids, false, payloads)) return nb::none();
    receive(ids, std::move(rest), payloads);
    return gather_columns(ids, payloads, outs, has_ids);
}

nb::object PoolState::gather_columns(const Ids& ids, const Payloads& payloads, const std::vector<nb::object>* outs, bool has_ids) {
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

// Of envs that are stepping, the observation is the newest that was received, and the rest is not defined. Before the first result, also
// after a restore, there are no infos: the payloads are those of other results.
nb::tuple PoolState::newest_batch() {
    const InUse in_use(*this);
    const Ids ids = all_;  // another vector than all_, so that the batch has no views
    Payloads payloads;
    Ids known = ids;  // not the spares of ended episodes: their payloads are of other results
    if (spares_.has_spares()) std::erase_if(known, [&](std::uint32_t id) { return spares_.is_staged(envs_[id].server) && !unclaimed_.is_unclaimed(id); });
    const UnclaimedResults::Batch& last = unclaimed_.last();
    const bool has_results = !last.ids.empty();
    if (last.has_payloads && last.ids == ids) payloads = last.payloads;
    else if (has_results && pending_.empty() && !gather_payloads(known, true, payloads)) return nb::make_tuple(true, nb::none());
    return nb::make_tuple(has_results, gather_columns(ids, payloads, nullptr, true));
}

// Returns the env of each row of a batch.
nb::object PoolState::row_ids(const Ids& ids) const {
    nb::object env_id = new_column(static_cast<npy_intp>(ids.size() * batch_size_), NPY_INT64);
    auto* target = data_of<std::int64_t>(env_id);
    for (const std::uint32_t id : ids) target = std::fill_n(target, batch_size_, id);
    return env_id;
}

nb::object PoolState::observe(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    Ids ids = parse_ids(env_ids, storage);  // another vector than all_, so that the result has no views
    return gather_obs(ids, nullptr);
}

void PoolState::receive(const Ids& ids, Ids rest, Payloads payloads, bool has_payloads) {
    mark_received(ids, std::move(rest));
    unclaimed_.remember(ids, std::move(payloads), has_payloads);
}

void PoolState::restore_unclaimed() {
    const InUse in_use(*this);
    UnclaimedResults::Batch batch = unclaimed_.pop_last();
    if (!batch.has_payloads) gather_payloads(batch.ids, false, batch.payloads);
    unclaimed_.store(batch, batch_size_);
}

// Marks envs as received: they become idle, and their target slots become the latest ones.
void PoolState::mark_received(const Ids& ids, Ids rest, bool is_seen) {
    const bool is_in_batch = log_.logs_batches() && is_all(ids) && !unclaimed_.is_any();
    if (is_in_batch) log_.write_batch();
    trace_envs(TraceKind::RECEIVED, ids);
    pending_ = std::move(rest);
    scanned_ = 0;
    const std::size_t num_agents = slab_->plan.outcome.num_agents;
    for (const std::uint32_t id : ids) {
        EnvRecord& env = envs_[id];
        if (unclaimed_.is_unclaimed(id)) {
            unclaimed_.release(id);
            continue;
        }
        leases_->unpin(env.latest);
        env.latest = env.target;
        const bool is_gone = env.object() == ObjectPhase::GONE;
        if (is_gone) envs_.move(id, ObjectPhase::CURRENT);
        if (env.is_masked()) {
            envs_.move(id, EnvPhase::EXHAUSTED);
            log_.skip_batch(id);
            continue;
        }
        if (env.uses_staged()) {
            spares_.copy_staged(env.server, row_of(id), env.target);
            env.command.source = Source::OWN_ROW;
        }
        if (env.is_cut()) mark_truncated(id);
        if (num_agents != 0) std::copy_n(slab_->alive(row_of(id)), num_agents, was_alive_.data() + row_of(id) * num_agents);
        if (is_batched_ || autoreset_ == Autoreset::SAME_STEP) record_ended_rows(id, env.is_cut());
        if (is_in_batch && autoreset_ == Autoreset::NEXT_STEP && !env.begins_episode() && !env.is_cut()) {  // hot: a step of all envs
            log_.count_in_batch(id);
        } else if (tracks_episodes_) {
            record_result(id, is_in_batch);
        }
        const bool is_last_result = budget_ != 0 && is_ended(id) && ++env.num_ended >= budget_;
        envs_.move(id, is_last_result ? EnvPhase::EXHAUSTED : EnvPhase::IDLE);
        if (env.is_cut()) [[unlikely]] env.drop_cut();
        if (is_seen && is_over(id)) swap_in_spare(id);
        else if (is_gone && env.phase() == EnvPhase::IDLE) envs_.fail(id);
    }
    if (is_in_batch) log_.add_batch();
    if (kernel_ != nullptr && is_all(ids)) find_uniform_slot();
}

// Called when a result is received. If is_in_batch, the batch log has it already.
void PoolState::record_result(std::uint32_t id, bool is_in_batch) {
    EnvRecord& env = envs_[id];
    const bool begins_next = autoreset_ == Autoreset::SAME_STEP && is_ended(id) && !is_last(env);
    if (begins_next && !env.begins_episode()) ++env.episode;
    if (!log_.is_on()) return;
    if (env.is_cut()) log_.drop(id);  // an episode that was cut short cannot be replayed; the next one, which this result may begin, can
    if (env.begins_episode() || begins_next) log_.begin(id, env.has_seed, std::exchange(env.reset_blob, nb::object()));
    log_.add_result(id, is_in_batch);
}

void PoolState::limit_logs(std::uint64_t size_bytes) {
    const InUse in_use(*this);
    log_.set_limit(size_bytes);
}

// ---- observations -----------------------------------------------------------------------------------------------

int PoolState::common_slot(const Ids& ids) const {
    if (is_all(ids) && uniform_slot_ != NO_SLOT) return uniform_slot_;
    const int slot = ids.empty() ? -1 : envs_[ids[0]].latest;
    for (const std::uint32_t id : ids) {
        if (envs_[id].latest != slot) return -1;
    }
    return slot;
}

nb::object PoolState::gather_obs(const Ids& ids, const std::vector<nb::object>* outs) {
    const int slot = common_slot(ids);
    nb::object lease;
    auto make_leaf = [&](const Node& node) -> PyObject* {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        const bool is_given = !format_.given[index].empty();
        if (outs == nullptr && !is_given) return wrapped(gather_leaf(leaf, ids, slot, lease));
        nb::object array = outs != nullptr ? (*outs)[index] : checked(new_array(leaf, static_cast<npy_intp>(ids.size() * batch_size_)));
        auto* target = data_of<std::byte>(array);
        is_given ? copy_given(index, ids, target) : gather_into(leaf, ids, slot, target);
        return outs != nullptr ? array.release().ptr() : wrapped(std::move(array));
    };
    if (format_.root.kind == Node::Kind::LEAF) return checked(make_leaf(format_.root));
    return checked(build_tree(format_.root, make_leaf, [&](const Node& node) { return opaque_column(ids, node.index).release().ptr(); }));
}

// Returns the object that replaces `array` in the batch: a new reference, or null with an exception set.
PyObject* PoolState::wrapped(nb::object array) const {
    return format_.wrap ? PyObject_CallOneArg(format_.wrap.ptr(), array.ptr()) : array.release().ptr();
}

void PoolState::copy_given(std::size_t index, const Ids& ids, std::byte* target) const {
    const std::vector<std::byte>& rows = format_.given[index];
    const std::size_t env_bytes = obs_.leaves[index].row_bytes * batch_size_;
    if (is_all(ids)) {
        std::memcpy(target, rows.data(), rows.size());
        return;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) std::memcpy(target + i * env_bytes, rows.data() + ids[i] * env_bytes, env_bytes);
}

// program: of the same tree, with other factories. given: by leaf index, a C array [num_rows, *shape] of the leaf's dtype.
void PoolState::set_observation_format(nb::handle program, nb::handle wrap, nb::dict given) {
    const InUse in_use(*this);
    ObservationFormat format{Node::parse(program), wrap.is_none() ? nb::object() : nb::borrow(wrap), std::vector<std::vector<std::byte>>(obs_.leaves.size())};
    for (const auto& [key, value] : given) {
        const auto index = nb::cast<std::size_t>(key);
        const Leaf& leaf = obs_.leaves.at(index);
        auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
        const std::size_t size = leaf.row_bytes * batch_size_ * num_envs_;
        if (!PyArray_Check(value.ptr()) || PyArray_TYPE(array) != leaf.type_num || !PyArray_ISCARRAY_RO(array) || static_cast<std::size_t>(PyArray_NBYTES(array)) != size) {
            raise(errors().usage, leaf.name() + " must be given as a C array of " + text_of(leaf.descr) + " with one row per row of the pool");
        }
        const auto* bytes = data_of<std::byte>(value);
        format.given[index].assign(bytes, bytes + size);
    }
    format_ = std::move(format);
}

nb::object PoolState::gather_leaf(const Leaf& leaf, const Ids& ids, int common_slot, nb::object& lease) {
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    // A view of bools is unsafe: a worker may write bytes other than 0 and 1.
    const bool is_leased = leaf.type_num != NPY_BOOL && is_all(ids) && !is_copy_ && common_slot >= static_cast<int>(slab_->plan.private_slots) &&
                           leaf.row_bytes * static_cast<std::size_t>(rows) >= lease_bytes_;
    if (is_leased) {
        const auto slot = static_cast<std::uint32_t>(common_slot);
        if (!lease) lease = nb::cast(new Lease(leases_, slot), nb::rv_policy::take_ownership);
        return checked(view_array(leaf, rows, slab_->base + leaf.column.at(slot, 0), lease.ptr()));
    }
    nb::object array = checked(new_array(leaf, rows));
    gather_into(leaf, ids, common_slot, data_of<std::byte>(array));
    return array;
}

void PoolState::gather_into(const Leaf& leaf, const Ids& ids, int common_slot, std::byte* target) const {
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

// Returns the caller's arrays, one per leaf, after checking shape, dtype, C order and writability.
std::vector<nb::object> PoolState::parse_out(const Ids& ids, nb::handle out) const {
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
            PyErr_Format(PyExc_ValueError, "%s must be a writable C array of %S with %zd rows of the observation's shape", leaf.name().c_str(), leaf.descr.ptr(), rows);
            return false;
        }
        outs[index] = nb::borrow(value);
        return true;
    };
    auto refuse = [](const Node&, PyObject*) {
        PyErr_SetString(PyExc_ValueError, "observations without a fixed size cannot be written to out");
        return false;
    };
    if (visit_tree(obs_.root, out.ptr(), take, refuse)) return outs;
    nb::python_error cause;
    const std::string text = "out does not fit this batch: " + text_of(cause.value());
    PyErr_SetString(errors().usage.ptr(), text.c_str());
    throw nb::python_error();
}

nb::object PoolState::opaque_column(const Ids& ids, int index) const {
    nb::list column;
    for (const std::uint32_t id : ids) {
        const nb::object& opaques = envs_[id].opaques;
        nb::object item = opaques ? nb::object(opaques[index]) : nb::none();
        if (is_batched_ && opaques) column.extend(item);
        else column.append(item);
    }
    return checked(PyList_AsTuple(column.ptr()));
}

// Returns one env's observation: the newest received, or (is_final) the last one of an episode that ended under SAME_STEP.
nb::object PoolState::env_obs(std::uint32_t env_id, nb::handle opaques, bool is_final) {
    const std::uint32_t row = row_of(env_id);
    const npy_intp rows = is_batched_ ? static_cast<npy_intp>(batch_size_) : -1;
    auto make_leaf = [&](const Node& node) -> PyObject* {
        const auto index = static_cast<std::size_t>(node.index);
        const Leaf& leaf = obs_.leaves[index];
        std::byte* source = slab_->base + (is_final ? slab_->plan.final_observation[index].at(0, row) : leaf.column.at(envs_[env_id].latest, row));
        // Inside a Dict or Tuple, samples of a Box of shape () are arrays, and Gymnasium's vector envs return them so.
        const bool is_scalar = node.leaf_kind == LeafKind::DISCRETE || &node == &obs_.root;
        if (rows < 0 && leaf.shape.empty() && is_scalar) return PyArray_Scalar(source, leaf.dtype(), nullptr);
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
