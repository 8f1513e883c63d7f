// Commands of the pool: checks first, then writes actions, seeds and tickets.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include <nanobind/stl/vector.h>

#include "pool/pool_state.hpp"
#include "shared/tree_visit.hpp"

namespace stepmill {

namespace {

std::string list_ids(const std::vector<std::uint32_t>& ids) {
    std::string text = "[";
    for (std::size_t i = 0; i < ids.size() && i < 16; ++i) text += (i ? ", " : "") + std::to_string(ids[i]);
    return text + (ids.size() > 16 ? ", …]" : "]");
}

[[noreturn]] void raise_busy(const std::vector<std::uint32_t>& busy) {
    const std::string text = "envs " + list_ids(busy) + " are still stepping, or their results were not received; recv() or reset() them before the next command";
    nb::list ids;
    for (const std::uint32_t id : busy) ids.append(id);
    const nb::object error = errors().busy(text, nb::arg("env_ids") = ids);
    PyErr_SetObject(errors().busy.ptr(), error.ptr());
    throw nb::python_error();
}

std::string of_leaf(const Leaf& leaf) { return leaf.path.empty() ? "" : " for leaf " + leaf.path; }

[[noreturn]] void raise_wrong_shape(const Leaf& leaf, PyArrayObject* source, const std::vector<npy_intp>& dims, std::uint32_t batch_size) {
    const int ndim = PyArray_NDIM(source);
    const bool is_only_count = ndim == static_cast<int>(dims.size()) && std::equal(dims.begin() + 1, dims.end(), PyArray_DIMS(source) + 1);
    const std::string unit = batch_size == 1 ? "env" : "row";
    if (is_only_count) {
        raise(errors().usage, "got " + std::to_string(PyArray_DIMS(source)[0]) + " actions for " + std::to_string(dims[0]) + " " + unit + "s" + of_leaf(leaf) + "; give one action per " + unit);
    }
    raise(errors().usage, "actions" + of_leaf(leaf) + " have shape " + shape_text(PyArray_DIMS(source), ndim) + "; give shape " + shape_text(dims.data(), static_cast<int>(dims.size())));
}

}  // namespace

// ---- actions ----------------------------------------------------------------------------------------------------

// Converts to an array of `rows` rows of a leaf, in its dtype and C order; a new reference.
nb::object PoolState::plain_actions(const Leaf& leaf, PyObject* value, npy_intp rows) const {
    nb::object array = nb::steal(PyArray_FROM_O(value));
    if (!array) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // Ctrl-C
        std::string why = text_of(nb::python_error().value());
        if (why.ends_with('.')) why.pop_back();
        raise(errors().usage, "actions" + of_leaf(leaf) + " are not an array: " + why + "; give an array of shape [num_envs, ...]");
    }
    auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
    std::vector<npy_intp> dims{rows};
    dims.insert(dims.end(), leaf.shape.begin(), leaf.shape.end());
    const bool is_shape = PyArray_NDIM(source) == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), PyArray_DIMS(source));
    if (!is_shape) raise_wrong_shape(leaf, source, dims, batch_size_);
    if (PyArray_TYPE(source) == leaf.type_num && PyArray_ISCARRAY_RO(source) && leaf.is_native) return array;
    const bool is_whole = PyTypeNum_ISINTEGER(leaf.type_num) || PyTypeNum_ISBOOL(leaf.type_num);
    const bool is_real = PyArray_ISINTEGER(source) || PyArray_ISFLOAT(source) || PyArray_ISBOOL(source);
    if (!(is_whole && is_real) && !PyArray_CanCastArrayTo(source, leaf.dtype(), NPY_SAME_KIND_CASTING)) {
        raise(errors().usage, "actions" + of_leaf(leaf) + " have dtype " + text_of(array.attr("dtype")) + "; give dtype " + text_of(leaf.descr));
    }
    const bool may_lose = (is_whole || PyArray_ISINTEGER(source)) && !PyArray_CanCastArrayTo(source, leaf.dtype(), NPY_SAFE_CASTING);
    nb::object convert = array.attr("astype");
    if (PyArray_ISFLOAT(source) && is_whole) {  // NumPy warns of a NaN that becomes an integer, which is refused below
        convert = nb::module_::import_("numpy").attr("errstate")(nb::arg("invalid") = "ignore")(convert);
    }
    nb::object cast = convert(leaf.descr, "C");
    if (may_lose && !nb::cast<bool>(nb::bool_(nb::steal(PyObject_RichCompare(cast.ptr(), array.ptr(), Py_EQ)).attr("all")()))) {
        raise(errors().usage, "actions" + of_leaf(leaf) + " have numbers that " + text_of(leaf.descr) + " cannot hold; give actions of the space");
    }
    return cast;
}

// Returns the actions of `num_envs` envs as an array per leaf. `opaque` visits the parts without a fixed size.
template <typename VisitOpaque>
std::vector<nb::object> PoolState::read_actions(nb::handle actions, std::size_t num_envs, const VisitOpaque& opaque) const {
    const auto rows = static_cast<npy_intp>(num_envs * batch_size_);
    std::vector<nb::object> arrays(action_.leaves.size());
    auto leaf = [&](const Node& node, PyObject* value) {
        const auto index = static_cast<std::size_t>(node.index);
        arrays[index] = plain_actions(action_.leaves[index], value, rows);
        return true;
    };
    if (visit_tree(action_.root, actions.ptr(), leaf, opaque)) return arrays;
    nb::python_error cause;
    const char* hint = PyList_Check(actions.ptr()) ? "; give its structure once, with arrays of one row per env, in place of a list of actions" : "";
    raise(errors().usage, "the actions do not fit the action space: " + text_of(cause.value()) + hint);
}

// Checks everything before it writes: a wrong action changes nothing.
void PoolState::write_actions(nb::handle actions, const Ids& ids, std::vector<nb::list>& opaques) {
    check_workers(ids, Command::STEP);
    if (action_.num_opaques != 0) opaques.resize(ids.size());
    auto opaque = [&](const Node&, PyObject* value) {
        nb::object items = nb::steal(PySequence_Fast(value, "actions without a fixed size must be a sequence with one item per env"));
        if (!items) return false;
        if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())) != ids.size()) {
            PyErr_Format(PyExc_ValueError, "got %zd actions for %zu envs", PySequence_Fast_GET_SIZE(items.ptr()), ids.size());
            return false;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) opaques[i].append(nb::handle(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))));
        return true;
    };
    const std::vector<nb::object> arrays = read_actions(actions, ids.size(), opaque);
    std::size_t held_offset = 0;
    for (std::size_t index = 0; index < arrays.size(); ++index) {
        const Column& column = action_.leaves[index].column;
        const auto* source = static_cast<const std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(arrays[index].ptr())));
        const std::size_t env_bytes = column.row_bytes * batch_size_;
        if (is_all(ids) && suspended_.empty()) {
            std::memcpy(slab_->base + column.at(0, 0), source, env_bytes * num_envs_);
            continue;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            Replay* replay = envs_[ids[i]].replay.get();  // the replay uses the row
            std::memcpy(replay ? replay->action.data() + held_offset : slab_->base + column.at(0, row_of(ids[i])), source + i * env_bytes, env_bytes);
        }
        held_offset += env_bytes;
    }
    // A server with a staged episode gets no command: its words are those of the staged reset, which may still run.
    for (const std::uint32_t id : ids) {
        const ServerLocation location = slab_->server_locations[envs_[id].server];
        if (!spares_.is_staged(envs_[id].server) && !envs_[id].is_suspended()) slab_->words[location.worker].flags[location.local] = 0;
    }
    for (std::size_t i = 0; i < opaques.size(); ++i) {
        if (!spares_.is_staged(envs_[ids[i]].server)) write_opaque_action(ids[i], opaques[i]);
    }
}

// For a step of a kernel without commands.
void PoolState::write_all_actions(nb::handle actions) {
    const std::vector<nb::object> arrays = read_actions(actions, num_envs_, [](const Node&, PyObject*) { return false; });
    for (std::size_t index = 0; index < arrays.size(); ++index) {
        const Column& column = action_.leaves[index].column;
        std::memcpy(slab_->base + column.at(0, 0), data_of<std::byte>(arrays[index]), column.row_bytes * num_envs_);
    }
}

// Writes the parts of an action without a fixed size: to the log, and for its worker unless the env is suspended, whose replay uses the row.
void PoolState::write_opaque_action(std::uint32_t id, const nb::list& opaques) {
    const nb::object blob = nb::make_tuple(nb::none(), nb::none(), opaques);
    try {
        const std::vector<std::uint8_t>& bytes = commands_.encode(blob.ptr());
        log_.set_blob(id, bytes);
        if (envs_[id].is_suspended()) envs_[id].replay->blob = bytes;
        else commands_.write_blob(envs_[id].server, bytes);
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
        raise(errors().usage, "the action of env " + std::to_string(id) + " cannot be sent: " + text_of(error.value()) + "; give values that can be pickled, and that fit");
    }
}

// ---- commands ---------------------------------------------------------------------------------------------------

// Records a moment of each of these envs.
void PoolState::trace_envs(TraceKind kind, const Ids& ids) const {
    LearnerTrace* trace = slab_->learner_trace();
    if (trace == nullptr) return;
    const std::uint64_t now = now_ns();
    for (const std::uint32_t id : ids) trace->add(kind, envs_[id].server, now, now);
}

void PoolState::send_steps(nb::handle actions, const Ids& ids, CommandKind kind) {
    const SampledTime timed(send_sampler_, slab_->pool->own.counters.send_ns, unclaimed_time_, TraceKind::SEND, slab_->learner_trace());
    check_idle(ids, kind);
    std::vector<nb::list> opaques;
    write_actions(actions, ids, opaques);
    dispatch(ids, Command::STEP);
}

// Steps all envs and waits; returns false if there is a fault. The caller holds InUse.
bool PoolState::step_all(nb::handle actions) {
    send_steps(actions, all_, CommandKind::STEP_ALL);
    slab_->pool->own.eager.store(0, std::memory_order_relaxed);
    return wait_until_done(pending_, num_envs_, nb::handle()) == WaitResult::READY;
}

nb::object PoolState::step(nb::handle actions) {
    const InUse in_use(*this, InUse::For::STEP_OF_ALL);
    if (uniform_slot_ != NO_SLOT) {
        nb::object result = step_uniform(actions);
        if (result) return result;
    }
    if (are_records_stale_) sync_records();
    return step_all(actions) ? collect_all() : nb::none();
}

nb::object PoolState::step_obs(nb::handle actions) {
    const InUse in_use(*this);
    if (!step_all(actions)) return nb::none();
    // Gathers payloads only if restore_unclaimed() could not do so later.
    const bool is_special = obs_.num_opaques != 0 || spares_.has_spares() || std::ranges::any_of(envs_, [](const EnvRecord& env) { return env.is_from_pool(); });
    const SampledTime timed(gather_sampler_, slab_->pool->own.counters.gather_ns, unclaimed_time_, TraceKind::GATHER, slab_->learner_trace());
    add_to(slab_->pool->own.counters.num_batches, 1);
    Payloads payloads;
    if (is_special && !gather_payloads(all_, false, payloads)) return nb::none();
    receive(all_, {}, std::move(payloads), is_special);
    return gather_obs(all_, nullptr);
}

void PoolState::send(nb::handle actions, nb::handle env_ids, bool skips_exhausted) {
    const InUse in_use(*this);
    Ids storage;
    send_steps(actions, parse_ids(env_ids, storage), skips_exhausted ? CommandKind::STEP_ALL : CommandKind::STEP);
}

// seeds: a list of int | None per env; blobs: a list of (seed, options, None) | None per env.
// spare_seeds: a list of int | None per spare; None: the spares are not reset.
void PoolState::send_reset(nb::handle env_ids, nb::handle seeds, nb::handle blobs, nb::handle spare_seeds) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    check_idle(ids, CommandKind::RESET);
    for (const std::uint32_t id : ids) {
        if (envs_[id].is_suspended()) raise(errors().bug, "env " + std::to_string(id) + " cannot be reset during its replay; please report this bug");
    }
    check_workers(ids, Command::RESET);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        EnvRecord& env = envs_[ids[i]];
        nb::object seed = seeds[i], blob = blobs[i];
        const bool is_staged = spares_.is_staged(env.server) && env.phase() == EnvPhase::IDLE && seed.is_none() && blob.is_none();
        env.command.source = is_staged ? Source::STAGING_ROW : Source::OWN_ROW;
        if (is_staged) continue;
        spares_.discard_staged(env.server);
        env.reset_blob.reset();
        if (!blob.is_none()) {
            const std::vector<std::uint8_t>& bytes = commands_.encode(blob.ptr());
            env.reset_blob = nb::bytes(bytes.data(), bytes.size());
            env.is_blob_seeded = !nb::object(blob[0]).is_none();
        }
        write_reset_seed(ids[i], seed);
        if (env.reset_blob) commands_.write_blob(env.server, env.reset_blob);
        if (spares_.has_spares()) spares_.record_explicit_reset(env.server, ids.size() == num_envs_ && ids[i] == 0, !env.has_blob_seed());
    }
    dispatch(ids, Command::RESET);
    if (!spare_seeds.is_none()) spares_.stage_all(spare_seeds);
}

// Writes the seed of an explicit reset. Without a given seed the worker derives it, unless its env object is new.
void PoolState::write_reset_seed(std::uint32_t id, nb::handle seed) const {
    const EnvRecord& env = envs_[id];
    const auto [words, local] = slab_->server_words(env.server);
    words.flags[local] = 0;
    if (!seed.is_none()) {
        words.seed[local] = nb::cast<std::uint64_t>(seed);
        words.flags[local] = FLAG_SEED;
        return;
    }
    const bool is_new = env.phase() != EnvPhase::IDLE || env.begins_episode_next();
    if (!is_new || !env.has_seed || (seeding_ == Seeding::CONTINUE && !env.is_recycled) || spares_.has_spares()) return;
    words.set_episode(local, env.base_seed, env.episode + (env.has_blob_seed() ? 0 : 1));
}

void PoolState::check_idle(const Ids& ids, CommandKind kind) const {
    const bool is_reset = kind == CommandKind::RESET;
    bool is_good = !unclaimed_.is_any();
    for (const std::uint32_t id : ids) is_good &= envs_[id].phase() == EnvPhase::IDLE || (is_reset && envs_[id].phase() != EnvPhase::PENDING);
    if (is_good && (is_reset || autoreset_ != Autoreset::DISABLED)) return;
    Ids busy, faulted, fresh, ended, exhausted;
    for (const std::uint32_t id : ids) {
        if (envs_[id].phase() == EnvPhase::PENDING || unclaimed_.is_unclaimed(id)) busy.push_back(id);
        if (envs_[id].phase() == EnvPhase::FAULTED) faulted.push_back(id);
        if (envs_[id].phase() == EnvPhase::NEW) fresh.push_back(id);
        if (envs_[id].phase() == EnvPhase::EXHAUSTED) exhausted.push_back(id);
        else if (autoreset_ == Autoreset::DISABLED && is_ended(id)) ended.push_back(id);
    }
    if (!busy.empty()) raise_busy(busy);
    if (is_reset) return;
    if (!faulted.empty()) raise(errors().usage, "envs " + list_ids(faulted) + " have a fault; reset them with reset(env_ids=...) or restore them with revive() before stepping them");
    const bool is_over = exhausted.size() == ids.size() && !ids.empty();
    if (is_over || (kind == CommandKind::STEP && !exhausted.empty())) {
        raise(errors().usage, "envs " + list_ids(exhausted) + " are exhausted and take no more steps; leave them out, or let them go on with reset(env_ids=...)");
    }
    if (!fresh.empty()) raise(errors().usage, "envs " + list_ids(fresh) + " need a reset, since they were never reset or were rebuilt; call reset() before stepping them");
    if (!ended.empty()) raise(errors().usage, "the episodes of envs " + list_ids(ended) + " are over and autoreset is DISABLED; reset them before stepping them");
}

// Raises DeadWorkers if a worker of these envs is dead, or one is to be recycled: Python then decides what to do, and sends again.
void PoolState::check_workers(const Ids& ids, Command command) const {
    Ids dead;
    for (const std::uint32_t id : ids) {
        if (command == Command::STEP && envs_[id].phase() == EnvPhase::EXHAUSTED) continue;  // it gets no command
        const std::uint32_t lane = lane_of(id), worker = slab_->worker_of[lane];
        if (slab_->workers[lane]->learner.dead.load(std::memory_order_acquire) == 0 || commands_.is_restarting(lane)) continue;
        if (std::ranges::count(dead, worker) == 0) dead.push_back(worker);
    }
    if (recycles_) add_workers_to_recycle(dead);
    if (dead.empty()) return;
    PyErr_SetObject(errors().dead_workers.ptr(), nb::cast(dead).ptr());
    throw nb::python_error();
}

// Returns a slot that no lease holds and that has no env's newest result; -1 if there is none. If all envs are commanded, results in a slot
// that can be lent need no copy.
int PoolState::find_common_slot(bool is_for_all) const {
    const std::uint32_t num_private = slab_->plan.private_slots, num_slots = slab_->plan.num_slots;
    if (is_for_all && !is_copy_ && num_slots > num_private) {
        if (const int slot = leases_->find_free(num_private, num_slots); slot >= 0) return slot;
        add_to(slab_->pool->own.counters.num_lease_copies, 1);
    }
    return leases_->find_free(0, num_private);
}

// Chooses the slots for the results: one for all, or else for each env one of the first two, in which it does not have its newest result.
void PoolState::choose_slots(const Ids& ids) {
    const int common = find_common_slot(is_all(ids));
    for (const std::uint32_t id : ids) {
        EnvRecord& env = envs_[id];
        const int own = env.latest == 0 ? 1 : 0;
        env.target = static_cast<std::uint8_t>(common >= 0 ? common : own);
        leases_->pin(env.target);
    }
}

void PoolState::dispatch(const Ids& ids, Command command) {
    uniform_slot_ = NO_SLOT;
    add_to(slab_->pool->own.counters.num_sends, 1);
    if (commands_.is_any_restarting()) mark_lost_late(ids);
    if (command == Command::STEP) store_final_obs(ids);
    flush_deferred_resets();
    choose_slots(ids);
    const auto first = static_cast<std::ptrdiff_t>(pending_.size());
    for (const std::uint32_t id : ids) {
        EnvRecord& env = envs_[id];
        const bool is_exhausted = env.phase() == EnvPhase::EXHAUSTED;
        pending_.push_back(id);
        envs_.move(id, EnvPhase::PENDING);
        env.command.kind = command;
        if (is_exhausted && command == Command::STEP) {
            mask(id);
            continue;
        }
        if (is_exhausted) env.num_ended = 0;
        if (env.is_suspended()) {
            dispatch_suspended(id);
            continue;
        }
        if (command == Command::STEP && env.object() == ObjectPhase::LOST) cut_short(id);
        if (is_done_early(env, command)) continue;
        if (command == Command::STEP ? spares_.has_spares() && spares_.is_staged(env.server) : env.uses_staged()) {
            use_staged(id);
            continue;
        }
        const ServerLocation location = slab_->server_locations[env.server];
        ServerWords& words = slab_->words[location.worker];
        const bool is_restored = command == Command::STEP && env.object() == ObjectPhase::RENEWED;
        if (is_restored) begin_episode(id);
        commands_.write(location, row_of(id), is_restored ? Command::RESET : command, env.target);
        if (command == Command::STEP && !is_restored && is_last(env)) words.flags[location.local] |= FLAG_LAST;
        record_command(id, words, location.local, command);
        commands_.add(env.server, location);  // the ticket grows before the doorbell rings: a worker that wakes early must already see its command
    }
    trace_envs(TraceKind::SENT, ids);  // before the workers are woken
    if (!is_all(ids)) std::sort(pending_.begin() + first, pending_.end());
    commands_.deliver();
}

}  // namespace stepmill
