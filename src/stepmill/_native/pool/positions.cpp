// The positions of envs as plain values: what a pool must know of an env to go on with it in another pool, or later.
//
// A position has no env object. The caller that restores it gives the object its state back: by a replay of the logged episode, for which the env
// is suspended here, or in another way.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernel/kernel_loop.hpp"
#include "pool/pool_state.hpp"

namespace stepmill {

namespace {

// Writes fields to a dict. Vectors become bytes.
struct FieldWriter {
    nb::dict fields;

    template <typename T>
    void operator()(const char* name, const T& value) {
        if constexpr (std::is_enum_v<T>) fields[name] = static_cast<int>(value);
        else fields[name] = value;
    }
    void operator()(const char* name, const nb::object& value) { fields[name] = value ? value : nb::none(); }
    template <typename T>
    void operator()(const char* name, const std::vector<T>& values) {
        fields[name] = nb::bytes(values.data(), values.size() * sizeof(T));
    }
};

// Reads them again. Throws an exception if a field is missing or has another type.
struct FieldReader {
    nb::dict fields;

    nb::object at(const char* name) const {
        if (!fields.contains(name)) throw std::invalid_argument(std::string("it lacks ") + name);
        return fields[name];
    }
    template <typename T>
    void operator()(const char* name, T& value) const {
        if constexpr (std::is_enum_v<T>) value = static_cast<T>(nb::cast<std::uint8_t>(at(name)));
        else value = nb::cast<T>(at(name));
    }
    void operator()(const char* name, nb::object& value) const {
        value = at(name);
        if (value.is_none()) value.reset();
    }
    template <typename T>
    void operator()(const char* name, std::vector<T>& values) const {
        const auto bytes = nb::cast<nb::bytes>(at(name));
        if (bytes.size() % sizeof(T) != 0) throw std::invalid_argument(std::string("the size of ") + name + " is wrong");
        values.resize(bytes.size() / sizeof(T));
        if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    }
};

void check(bool is_right, const char* name) {
    if (!is_right) throw std::invalid_argument(std::string(name) + " is wrong");
}

bool is_bytes_or_null(const nb::object& value) { return !value || PyBytes_Check(value.ptr()); }

}  // namespace

// What a position has beside the records of the pool.
struct PositionRest {
    EnvPhase phase = EnvPhase::NEW;
    ObjectPhase object = ObjectPhase::CURRENT;
    std::int64_t place = -1;      // among the pending envs; -1: it is not pending
    bool is_replayed = false;     // the log gives the object its state back
    std::vector<double> rewards;  // these three: of the logged outcomes
    std::vector<ObsHash> hashes;
    std::vector<std::uint8_t> outcome_flags;
    Command command = Command::NONE;  // these four: the words of the newest command
    std::uint8_t flags = 0;
    std::uint64_t seed = 0, episode = 0;
    std::vector<std::byte> action, obs, outcome, sums;  // the rows of the env
    std::vector<std::uint8_t> ended, was_alive;
    nb::object memory;            // of a kernel
    nb::object unclaimed;         // (payload, last observation) of a result that has not reached the user
};

struct SavedPosition {
    EnvRecord env;
    LoggedEpisode log;
    PositionRest rest;
};

template <typename Field, typename Env, typename Log, typename Rest>
void visit_fields(Field& field, Env& env, Log& log, Rest& rest) {
    field("phase", rest.phase), field("object", rest.object), field("place", rest.place), field("is_replayed", rest.is_replayed);
    field("has_seed", env.has_seed), field("base_seed", env.base_seed), field("env_episode", env.episode), field("num_ended", env.num_ended);
    field("is_recycled", env.is_recycled), field("is_blob_seeded", env.is_blob_seeded), field("reset_blob", env.reset_blob);
    field("command_kind", env.command.kind), field("begins", env.command.begins), field("source", env.command.source);
    field("cut_info", env.cut_info), field("lost_info", env.lost_info);
    field("final_obs", env.final_obs), field("opaques", env.opaques);
    field("length", log.length), field("length_before", log.length_before), field("number", log.episode), field("is_whole", log.is_whole);
    field("actions", log.actions), field("blobs", log.blobs), field("blob_ends", log.blob_ends), field("newest_blob", log.newest_blob), field("begin_blob", log.reset_blob);
    field("rewards", rest.rewards), field("hashes", rest.hashes), field("outcome_flags", rest.outcome_flags);
    field("command", rest.command), field("flags", rest.flags), field("seed", rest.seed), field("episode", rest.episode);
    field("action", rest.action), field("obs", rest.obs), field("outcome", rest.outcome), field("sums", rest.sums);
    field("ended", rest.ended), field("was_alive", rest.was_alive), field("unclaimed", rest.unclaimed), field("memory", rest.memory);
}

// ---- saving ---------------------------------------------------------------------------------------------------------

nb::list PoolState::positions(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    nb::list found;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) found.append(position_of(id));
    return found;
}

nb::dict PoolState::position_of(std::uint32_t id) {
    const EnvRecord& env = envs_[id];
    const bool is_pending = env.phase() == EnvPhase::PENDING;
    const bool is_settled = env.object() == ObjectPhase::CURRENT || env.object() == ObjectPhase::RENEWED || env.object() == ObjectPhase::LOST;
    if (!is_settled || (is_pending && is_done(id) && has_fault(id))) {
        raise(errors().busy, "env " + std::to_string(id) + " has a fault that was not received, or is being rebuilt; receive its result before you save it");
    }
    const auto [words, local] = slab_->server_words(env.server);
    const LoggedEpisode& log = log_.complete(id);
    PositionRest rest;
    rest.phase = env.phase(), rest.object = env.object();
    if (is_pending) rest.place = std::ranges::find(pending_, id) - pending_.begin();
    for (const Outcome& each : log.outcomes) rest.rewards.push_back(each.reward), rest.hashes.push_back(each.hash), rest.outcome_flags.push_back(each.flags);
    rest.command = get_command(words, local), rest.flags = words.flags[local], rest.seed = words.seed[local], rest.episode = words.episode[local];
    rest.action.resize(slab_->action_bytes());
    slab_->read_action(id, rest.action.data());
    visit_obs(id, env.latest, append_to(rest.obs));
    visit_outcome(id, append_to(rest.outcome));
    visit_sums(id, append_to(rest.sums));
    rest.ended.assign(ended_.begin() + row_of(id), ended_.begin() + row_of(id) + batch_size_);
    const std::size_t num_alive = was_alive_.size() / num_envs_;
    rest.was_alive.assign(was_alive_.begin() + static_cast<std::ptrdiff_t>(id * num_alive), was_alive_.begin() + static_cast<std::ptrdiff_t>((id + 1) * num_alive));
    if (unclaimed_.is_unclaimed(id)) {
        const nb::object& payload = unclaimed_.payload(id);
        const nb::object& final_obs = unclaimed_.final_obs(id);
        rest.unclaimed = nb::make_tuple(payload ? payload : nb::none(), final_obs ? final_obs : nb::none());
    }
    if (kernel_ != nullptr) rest.memory = kernel_->save(local);
    FieldWriter field;
    visit_fields(field, env, log, rest);
    field("needs_state", has_episode(id) && !(is_pending && env.begins_episode()) && env.object() == ObjectPhase::CURRENT);
    field("reset_seed", seed_of(id, env.episode));
    return field.fields;
}

// ---- restoring ------------------------------------------------------------------------------------------------------

SavedPosition PoolState::read_position(nb::handle fields) const {
    SavedPosition saved;
    auto& [env, log, rest] = saved;
    FieldReader field{nb::cast<nb::dict>(fields)};
    visit_fields(field, env, log, rest);
    check(static_cast<std::uint8_t>(rest.phase) < NUM_ENV_PHASES && is_legal(rest.phase, rest.object) && !is_suspended(rest.object), "its phase");
    check(env.command.kind <= Command::RESET && env.command.begins <= Begins::EPISODE_OF_EACH_ROW && env.command.source <= Source::STAGING_ROW && rest.command <= Command::RESET, "its command");
    check((rest.place >= 0) == (rest.phase == EnvPhase::PENDING), "its state");
    check((env.command.source == Source::OWN_ROW) || spares_.has_spares(), "its source");
    std::size_t obs_bytes = 0, outcome_bytes = 0, sums_bytes = 0;
    visit_obs(0, 0, add_to_size(obs_bytes));
    visit_outcome(0, add_to_size(outcome_bytes));
    visit_sums(0, add_to_size(sums_bytes));
    check(rest.obs.size() == obs_bytes && rest.outcome.size() == outcome_bytes && rest.sums.size() == sums_bytes && rest.action.size() == slab_->action_bytes(), "the size of its rows");
    check(rest.ended.size() == batch_size_ && rest.was_alive.size() == was_alive_.size() / num_envs_, "the number of its rows");
    check(is_bytes_or_null(env.reset_blob) && is_bytes_or_null(log.reset_blob), "its reset");
    check(!env.opaques || (PyList_CheckExact(env.opaques.ptr()) && PyList_GET_SIZE(env.opaques.ptr()) == obs_.num_opaques), "its observation");
    check(!rest.unclaimed || (PyTuple_CheckExact(rest.unclaimed.ptr()) && PyTuple_GET_SIZE(rest.unclaimed.ptr()) == 2), "its result");
    const std::size_t num = rest.rewards.size(), num_steps = num == 0 ? 0 : num - 1;
    check(rest.hashes.size() == num && rest.outcome_flags.size() == num && log.actions.size() == num_steps * slab_->action_bytes(), "the size of its log");
    check(log.blob_ends.size() == (log_.has_blobs() ? num_steps : 0) && std::ranges::is_sorted(log.blob_ends) && (log.blob_ends.empty() || log.blob_ends.back() == log.blobs.size()), "its logged actions");
    check(!rest.is_replayed || (log.is_whole && num != 0) || rest.phase == EnvPhase::NEW || env.begins_episode(), "its log");
    check(kernel_ == nullptr || (rest.memory && PyTuple_CheckExact(rest.memory.ptr()) && PyTuple_GET_SIZE(rest.memory.ptr()) == 2), "its memory");
    if (kernel_ != nullptr) kernel_->check_saved(rest.memory);
    for (std::size_t i = 0; i < num; ++i) log.outcomes.push_back({rest.rewards[i], rest.hashes[i], rest.outcome_flags[i]});
    return saved;
}

// Gives these envs their positions, or one position to all of them. Nothing has changed if this throws. An env with `is_replayed` is suspended: its replay must follow.
// spares: the positions of all servers, or None.
void PoolState::restore_positions(nb::handle env_ids, nb::list saved, nb::object spares) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    if (ids.empty()) return;
    check_idle(ids, CommandKind::RESET);
    std::vector<SavedPosition> positions;
    try {
        for (const std::uint32_t id : ids) check(!envs_[id].is_suspended(), "the state of the env");
        for (nb::handle each : saved) positions.push_back(read_position(each));
        if (!spares.is_none()) spares_.restore(nb::cast<nb::dict>(spares));
    } catch (nb::python_error&) {
        throw;
    } catch (std::exception& error) {
        raise(errors().usage, "the position of env " + std::to_string(ids[positions.size() % ids.size()]) + " does not fit these envs, or is damaged: " + error.what() + "; give one that was saved from envs of the same kind");
    }
    uniform_slot_ = NO_SLOT;
    unclaimed_.forget(ids.size() == num_envs_);  // of the episodes before
    std::vector<std::pair<std::int64_t, std::uint32_t>> pending;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const SavedPosition& position = positions[i % positions.size()];
        if (position.rest.place >= 0) pending.emplace_back(position.rest.place, ids[i]);
        restore_position(ids[i], position);
        const EnvRecord& env = envs_[ids[i]];
        if (position.rest.is_replayed && has_episode(ids[i]) && env.object() == ObjectPhase::CURRENT) suspend(ids[i], make_replay(ids[i])), env.replay->is_restored = true;
    }
    std::ranges::sort(pending);
    for (const auto& each : pending) pending_.push_back(each.second);
    for (std::uint32_t server = 0; !spares.is_none() && server < slab_->server_locations.size(); ++server) {
        const std::uint32_t id = spares_.env_of(server);
        if (id == NO_ENV || envs_[id].phase() != EnvPhase::PENDING) spares_.stage_again(server);
    }
    scanned_ = 0;
}

void PoolState::restore_position(std::uint32_t id, const SavedPosition& saved) {
    const auto& [record, log, rest] = saved;
    EnvRecord& env = envs_[id];
    const std::uint8_t latest = env.latest < slab_->plan.private_slots ? env.latest : std::uint8_t{0};  // not a slot that is lent
    const std::uint32_t server = spares_.has_spares() ? spares_.server_of(id) : env.server;
    unclaimed_.release(id);
    leases_->unpin(env.latest);
    envs_.restore(id, record, rest.phase, rest.object);
    env.latest = latest, env.target = latest == 0 ? 1 : 0;
    leases_->pin(env.latest);
    if (rest.place >= 0) leases_->pin(env.target);
    assign_server(id, server);  // forgets what has become of the object before
    envs_.restore(id, rest.object), env.lost_info = record.lost_info;
    log_.restore(id, log);
    const auto [words, local] = slab_->server_words(server);
    set_command(words, local, rest.command);
    words.flags[local] = static_cast<std::uint8_t>(rest.flags & ~FLAG_BLOB);
    words.seed[local] = rest.seed, words.episode[local] = rest.episode;
    words.payload_bytes[local] = 0, words.result[local] = 0;
    words.fault[local].store(0, std::memory_order_relaxed);
    if (rest.place >= 0 && env.reset_blob) commands_.write_blob(server, env.reset_blob);
    slab_->write_action(id, rest.action.data());
    visit_obs(id, env.latest, write_from(rest.obs));
    visit_outcome(id, write_from(rest.outcome));
    visit_sums(id, write_from(rest.sums));
    std::ranges::copy(rest.ended, ended_.begin() + row_of(id));
    std::ranges::copy(rest.was_alive, was_alive_.begin() + static_cast<std::ptrdiff_t>(id * rest.was_alive.size()));
    if (rest.unclaimed) unclaimed_.put(id, rest.unclaimed[0], rest.unclaimed[1]);
    if (kernel_ != nullptr) kernel_->restore(local, rest.memory);
}

}  // namespace stepmill
