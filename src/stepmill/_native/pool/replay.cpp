// Which episode an env is in, and replays of logged episodes.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include <nanobind/stl/vector.h>

#include "pool/pool_state.hpp"
#include "shared/seeds.hpp"

namespace stepmill {

namespace {

nb::bytes bytes_of(std::span<const std::byte> bytes) { return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }

}  // namespace

// ---- which episode an env plays ---------------------------------------------------------------------------------

void PoolState::record_command(std::uint32_t id, const ServerWords& words, std::uint32_t local, Command command) {
    EnvRecord& env = envs_[id];
    const bool is_explicit = command == Command::RESET;
    record_begin(id, is_explicit, is_explicit || get_command(words, local) == Command::RESET || (autoreset_ == Autoreset::NEXT_STEP && is_ended(id)));
    const bool is_own_seed = env.begins_episode() && (words.flags[local] & FLAG_SEED) && !(words.flags[local] & FLAG_EPISODE);
    if (is_own_seed) {
        env.base_seed = words.seed[local];
        env.has_seed = true;
        env.episode = 0;
    } else if (env.begins_episode() && !env.has_blob_seed()) {
        ++env.episode;  // as in Loop::perform_reset: a seed that does not fit the seed word leaves the count unchanged
    }
}

void PoolState::record_begin(std::uint32_t id, bool is_explicit, bool is_reset) {
    EnvRecord& env = envs_[id];
    env.command.begins = is_reset ? Begins::EPISODE : resets_itself(id) ? Begins::EPISODE_OF_EACH_ROW : Begins::NOTHING;
    if (is_reset && !is_explicit) env.reset_blob.reset();
    env.is_recycled &= !is_reset;
    if (is_explicit) [[unlikely]] envs_.move(id, ObjectPhase::CURRENT), env.drop_cut();
    if (is_reset && spares_.has_spares()) spares_.count_begun(env.server);
}

nb::list PoolState::view(const Ids& servers, const Ids& env_ids) {
    const InUse in_use(*this);
    nb::list views;
    for (const std::uint32_t server : servers) views.append(view_of(server));
    for (const std::uint32_t id : env_ids) views.append(view_of(id < num_envs_ ? envs_.at(id).server : spares_.queued_server(id - num_envs_)));
    return views;
}

// Episodes are counted by commands if there are spares, since the server's env changes; else by results received, since with SAME_STEP
// only the result says whether a step has begun an episode.
nb::object PoolState::view_of(std::uint32_t server) const {
    const auto [lane, local] = slab_->server_locations.at(server);
    const std::uint32_t worker = slab_->worker_of[lane], id = spares_.env_of(server), ticket = commands_.ticket(server);
    const WorkerControl& control = *slab_->workers[lane];
    const std::uint32_t current = control.own.current.load(std::memory_order_acquire), num_requests = control.learner.requests.load(std::memory_order_acquire);
    const bool has_run_last = current == local, is_in_request = current == NO_SERVER && control.own.serving.load(std::memory_order_acquire) != 0;
    if (id == NO_ENV) {
        return view_type_(server, worker, nb::none(), ticket, name_of(ObjectPhase::CURRENT), false, spares_.num_begun(server), 0, UINT64_MAX, 0, false, true, spares_.is_staged(server),
                          has_run_last, is_in_request, num_requests);
    }
    const EnvRecord& env = envs_[id];
    const LoggedEpisode& episode = log_.of(id);
    const bool is_pending = env.is_commanded();
    const bool is_staged = spares_.is_staged(server) && !is_pending;
    const bool is_beginning = is_staged || (is_pending && env.begins_episode());
    const bool is_between = is_beginning || env.phase() == EnvPhase::NEW || env.phase() == EnvPhase::FAULTED;
    const bool is_counted = spares_.has_spares();
    return view_type_(server, worker, id, ticket, name_of(env.object()), episode.is_whole, is_counted ? spares_.num_begun(server) : episode.episode, is_counted && is_beginning ? 0 : episode.length,
                      is_counted ? UINT64_MAX : episode.length_before, env.num_ended, is_pending, is_between, is_counted && is_staged, has_run_last, is_in_request, num_requests);
}

// Returns the seed of the reset that began an episode; None if the env's own generator continued.
nb::object PoolState::seed_of(std::uint32_t id, std::uint64_t episode) const {
    const EnvRecord& env = envs_[id];
    if (!env.has_seed || (seeding_ == Seeding::CONTINUE && episode != 0)) return nb::none();
    return nb::int_(seed_of_episode(seeding_, env.base_seed, env.server, episode));
}

// Returns the log of the newest episode and the outstanding command. If that is a reset, the log is that of the previous episode, which
// is complete only if it ended by itself.
// Called by the pool's thread, between its other calls.
nb::dict PoolState::episode_log(std::uint32_t env_id) {
    check_open();
    const LoggedEpisode& episode_log = log_.complete(env_id);
    const EnvRecord& env = envs_[env_id];
    const ServerLocation location = slab_->server_locations[env.server];
    const bool is_pending = env.phase() == EnvPhase::PENDING;
    const bool begins = is_pending && env.begins_episode();
    const bool is_explicit = begins && get_command(slab_->words[location.worker], location.local) == Command::RESET;
    const bool is_whole = episode_log.is_whole && !is_explicit;
    const std::uint64_t episode = begins && !is_explicit && env.episode != 0 ? env.episode - 1 : env.episode;

    std::vector<std::byte> action(slab_->action_bytes());
    if (env.replay) action = env.replay->action;  // the replay uses the row
    else slab_->read_action(env_id, action.data());
    nb::list rewards, flags, hashes;
    for (const Outcome& outcome : episode_log.outcomes) {
        if (!is_whole) break;
        rewards.append(outcome.reward);
        flags.append(static_cast<int>(outcome.flags));
        hashes.append(outcome.hash);
    }
    nb::dict log;
    log["is_whole"] = is_whole;
    log["is_pending"] = is_pending;
    log["begins"] = begins;
    log["is_explicit"] = is_explicit;
    log["episode"] = episode;
    log["seed"] = seed_of(env_id, episode);
    log["next_seed"] = seed_of(env_id, begins ? env.episode : env.episode + 1);
    const nb::object& blob = is_explicit ? env.reset_blob : episode_log.reset_blob;
    log["blob"] = blob ? blob : nb::none();
    log["actions"] = bytes_of(is_whole ? episode_log.actions : std::vector<std::byte>());
    log["action"] = bytes_of(action);
    nb::list blobs;
    for (std::size_t step = 1; is_whole && step <= episode_log.blob_ends.size(); ++step) blobs.append(bytes_of(std::as_bytes(episode_log.blob_of(step))));
    log["blobs"] = blobs, log["newest_blob"] = bytes_of(std::as_bytes(std::span(episode_log.newest_blob)));
    log["rewards"] = rewards, log["flags"] = flags, log["hashes"] = hashes;
    return log;
}

nb::tuple PoolState::newest_outcome(std::uint32_t env_id) const {
    check_open();
    const Outcome outcome = log_.outcome_of(env_id);
    return nb::make_tuple(outcome.reward, static_cast<int>(outcome.flags), outcome.hash);
}

// ---- suspended envs ----------------------------------------------------------------------------------------------

std::unique_ptr<Replay> PoolState::make_replay(std::uint32_t id) const {
    auto replay = std::make_unique<Replay>();
    replay->action.resize(slab_->action_bytes());
    replay->blob = log_.of(id).newest_blob;
    std::size_t sums_bytes = 0, outcome_bytes = 0;
    visit_sums(id, add_to_size(sums_bytes));
    if (unclaimed_.is_unclaimed(id)) visit_outcome(id, add_to_size(outcome_bytes));
    replay->sums.reserve(sums_bytes), replay->outcome.reserve(outcome_bytes);
    return replay;
}

// From here to resume_env() the env counts as busy, whatever its worker publishes.
void PoolState::suspend(std::uint32_t id, std::unique_ptr<Replay> replay) {
    EnvRecord& env = envs_[id];
    const bool is_commanded = env.is_commanded();
    replay->was_ended = !is_commanded && is_ended(id);
    const bool is_counted = env.phase() == EnvPhase::EXHAUSTED || env.is_masked() || replay->was_ended;
    replay->was_last = budget_ != 0 && env.num_ended + (is_counted ? 0 : 1) >= budget_;
    slab_->read_action(id, replay->action.data());
    visit_sums(id, append_to(replay->sums));
    if (unclaimed_.is_unclaimed(id)) visit_outcome(id, append_to(replay->outcome));
    replay->never_done.store(*env.ticket + (1u << 31), std::memory_order_relaxed);
    env.done = &replay->never_done;
    env.replay = std::move(replay);
    suspended_.insert(std::ranges::lower_bound(suspended_, id), id);
    envs_.move(id, ObjectPhase::AWAITING_REPLAY);
}

void PoolState::resume_env(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    const ServerLocation location = slab_->server_locations[env.server];
    env.done = &slab_->words[location.worker].done[location.local];
    slab_->write_action(id, env.replay->action.data());
    env.replay.reset();
    std::erase(suspended_, id);
    envs_.move(id, ObjectPhase::CURRENT);
    scanned_ = 0;
}

// Restores what the replay has overwritten in the rows: the sums, and the outcome of an unclaimed result.
void PoolState::restore_outcome(std::uint32_t id) {
    const Replay& replay = *envs_[id].replay;
    visit_sums(id, write_from(replay.sums));
    if (!replay.outcome.empty()) visit_outcome(id, write_from(replay.outcome));
}

// Resumes an env without a replay: restores the sums and the outcome in the slab, and drops the result of the replay.
void PoolState::resume_with_fault(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    const auto [words, local] = slab_->server_words(env.server);
    restore_outcome(id);
    if (!env.is_commanded() && !is_batched_) *slab_->over(row_of(id)) = env.replay->was_ended;
    if (env.is_masked()) empty_row(id);
    words.flags[local] = 0;
    resume_env(id);
    if (words.done[local].load(std::memory_order_acquire) != *env.ticket) return;  // its worker is killed, and its command becomes a fault
    words.clear_result(local);
    words.fault[local].store(static_cast<std::uint32_t>(env.is_commanded() ? Fault::DIED : Fault::NONE), std::memory_order_relaxed);
}

// Gives a step to a suspended env: write_actions() has stored its action in the Replay.
void PoolState::dispatch_suspended(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    Replay& replay = *env.replay;
    record_begin(id, false, autoreset_ == Autoreset::NEXT_STEP && replay.was_ended);
    if (env.begins_episode()) ++env.episode;
    replay.is_sent = true;
}

// ---- replay -----------------------------------------------------------------------------------------------------

// Starts to play the episode of a suspended env again, up to the newest result received: with the usual words, one command at a time, while
// the pool waits (advance_replays). Results go to a private slot that the env does not use otherwise.
void PoolState::begin_replay(Decision& decision) {
    const std::uint32_t id = decision.id;
    EnvRecord& env = envs_[id];
    Replay& replay = *env.replay;
    const auto [words, local] = slab_->server_words(env.server);
    if (env.is_commanded() && env.begins_episode()) {  // the old episode is not needed
        if (replay.is_sent) set_command(words, local, Command::STEP);
        resume_env(id);
        retry_reset(id);
        return;
    }
    replay.step = 0;
    replay.places = std::move(decision.places);
    replay.is_finished_here = decision.is_finished_here;
    words.flags[local] = log_.of(id).reset_blob ? FLAG_BLOB : 0;  // prepare() has written the blob
    words.set_episode(local, env.base_seed, env.episode);
    issue_replayed(id);
}

// Gives the next command of the log. After the last one, finishes the replay or pauses with PLAYED.
void PoolState::issue_replayed(std::uint32_t id) {
    const EnvRecord& env = envs_[id];
    const LoggedEpisode& episode = log_.of(id);
    Replay& replay = *env.replay;
    if (!episode.is_whole) return pause(id, ReplayEvent::FAILED);  // dropped since the replay began: Python sees that and cuts the episode short
    if (replay.step == episode.outcomes.size()) {
        if (replay.is_restored && replay.step != 0) copy_obs(id, replay.slot, env.latest);
        if (!replay.is_finished_here) return pause(id, ReplayEvent::PLAYED);
        has_news_ |= waits_for_replays_;
        return finish_replay(id);
    }
    const ServerLocation location = slab_->server_locations[env.server];
    if (replay.step == 1) slab_->words[location.worker].flags[location.local] = replay.was_last ? FLAG_LAST : 0;
    if (replay.step > 0) slab_->write_action(id, episode.actions.data() + (replay.step - 1) * slab_->action_bytes());
    if (replay.step > 0 && log_.has_blobs()) commands_.repeat_blob(env.server, episode.blob_of(replay.step));
    replay.slot = 0;
    while (replay.slot == env.latest || replay.slot == env.target) ++replay.slot;
    envs_.move(id, ObjectPhase::REPLAYING);
    issue(id, replay.step == 0 ? Command::RESET : Command::STEP, replay.slot);
}

void PoolState::copy_obs(std::uint32_t id, std::uint32_t from, std::uint32_t to) const {
    for (const Leaf& leaf : obs_.leaves) std::memcpy(slab_->base + leaf.column.at(to, row_of(id)), slab_->base + leaf.column.at(from, row_of(id)), leaf.row_bytes * batch_size_);
}

void PoolState::pause(std::uint32_t id, ReplayEvent event) {
    envs_.move(id, ObjectPhase::PAUSED);
    envs_[id].replay->event = event;
    has_news_ = true;
}

// Compares each result with the logged outcome of the same command. A paused replay has no outstanding command that would become a fault
// when its worker dies, for example during a repeated call.
void PoolState::advance_replays() {
    for (const std::uint32_t id : Ids(suspended_)) {
        Replay& replay = *envs_[id].replay;
        if (envs_[id].object() == ObjectPhase::PAUSED && replay.event != ReplayEvent::FAILED) {
            const std::uint32_t lane = lane_of(id);
            if (!commands_.is_restarting(lane) && slab_->workers[lane]->learner.reaped.load(std::memory_order_acquire) != 0) pause(id, ReplayEvent::FAILED);
        }
        if (envs_[id].object() != ObjectPhase::REPLAYING || !commands_.is_done(envs_[id].server)) continue;
        if (has_fault(id) || !log_.of(id).is_whole) pause(id, ReplayEvent::FAILED);
        else if (!(log_.outcome_of(id) == log_.of(id).outcomes[replay.step])) pause(id, ReplayEvent::DIFFERS);
        else if (std::ranges::count(replay.places, ++replay.step) != 0) pause(id, ReplayEvent::AT_PLACE);
        else issue_replayed(id);
    }
}

// The env is in the state that the user expects: gives its pending command.
void PoolState::finish_replay(std::uint32_t id) {
    const EnvRecord& env = envs_[id];
    const auto [words, local] = slab_->server_words(env.server);
    words.flags[local] = 0;
    if (log_.has_blobs() && env.is_commanded()) commands_.repeat_blob(env.server, env.replay->blob);
    if (!env.replay->outcome.empty()) restore_outcome(id);
    resume_env(id);
    if (env.is_masked()) empty_row(id);  // an exhausted env's row stays empty
    if (!env.is_commanded()) return;
    if (is_last(env)) words.flags[local] |= FLAG_LAST;
    issue(id, Command::STEP, env.target);
}

void PoolState::notify() {
    is_notified_.store(true, std::memory_order_release);
    if (slab_) ring_pool(*slab_->pool);
}

}  // namespace stepmill
