// What the pool state does after a fault: episodes that are cut short, restarts of workers.
//
// While a command has a fault, or its worker is dead, the pool may write the result words of the row: the owner has lost its claim, or is
// gone.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <utility>

#include <nanobind/stl/vector.h>

#include "pool/pool_state.hpp"
#include "shared/reaper.hpp"

namespace stepmill {

// ---- faults -----------------------------------------------------------------------------------------------------

void PoolState::mark_faulted(std::uint32_t id) {
    leases_->unpin(envs_[id].target);
    if (envs_[id].uses_staged()) discard_staged(id);
    envs_.fail(id);
}

// Counts each fault once. An unknown kind, which a worker has written over the right one, counts as bad output.
void PoolState::count_fault(std::uint32_t id, std::uint32_t kind) {
    EnvRecord& env = envs_[id];
    if (env.counted_ticket == *env.ticket) return;
    env.counted_ticket = *env.ticket;
    auto& counts = slab_->env_counters(id).num_faults;
    ++counts[kind < counts.size() ? kind : static_cast<std::uint32_t>(Fault::BAD_OUTPUT)];
}

// Everything that Python must decide about, as objects of pool/events.py. Called again, it returns the same events, until a decision
// moves their envs or workers on. A death comes with the faults of all its commands: the reaper writes it before them, lane by lane.
nb::list PoolState::drain(bool acknowledge) {
    const InUse in_use(*this);
    const auto count_dead = [&] { return std::ranges::count_if(slab_->lanes, [&](const Ids& lanes) { return is_dead(lanes); }); };
    nb::list events;
    for (std::ptrdiff_t num_dead = -1; num_dead != count_dead();) {
        num_dead = count_dead();
        if (num_dead != 0 && reaper_ != nullptr) reaper_->finish_marking();
        events = events_of_now();
    }
    if (acknowledge) {  // last: an exception above must not lose what the next wait would return
        is_notified_.store(false, std::memory_order_release);
        has_news_ = false;
    }
    return events;
}

nb::list PoolState::events_of_now() {
    nb::list events;
    for (const std::uint32_t id : pending_) {
        if (is_done(id) && has_fault(id)) events.append(failure_of(id));
    }
    for (const std::uint32_t id : suspended_) {
        if (envs_[id].object() != ObjectPhase::PAUSED) continue;
        const Replay& replay = *envs_[id].replay;
        events.append(event_types_[static_cast<std::size_t>(Event::REPLAY_PAUSED) + static_cast<std::size_t>(replay.event)](id, *envs_[id].ticket, replay.step));
    }
    for (std::uint32_t worker = 0; worker < num_workers_; ++worker) {
        if (is_dead(worker) && !is_restarting(worker)) events.append(death_of(worker));
    }
    return events;
}

// Counts each death once.
nb::object PoolState::death_of(std::uint32_t worker) {
    WorkerControl& control = process_words(worker);
    const std::uint32_t life = control.learner.num_restarts.load() + 1;
    control.learner.num_deaths += std::exchange(counted_lives_[worker], life) != life;
    nb::list running, faults;
    const Ids ids = spares_.envs_of(worker);
    for (const std::uint32_t id : ids) {
        const ServerLocation location = slab_->server_locations[envs_[id].server];
        if (slab_->workers[location.worker]->own.current.load(std::memory_order_acquire) == location.local) running.append(id);
        if (is_lost(id)) faults.append(failure_of(id));
    }
    return event_types_[static_cast<std::size_t>(Event::WORKER_DIED)](worker, life - 1, ids, running, faults);
}

nb::object PoolState::failure_of(std::uint32_t id) {
    const EnvRecord& env = envs_[id];
    const ServerLocation location = slab_->server_locations[env.server];
    const auto kind = env.fault->load(std::memory_order_relaxed);
    count_fault(id, kind);
    nb::object record = nb::none();  // dead workers leave none
    if (env.fault_record && env.recorded_ticket == *env.ticket) {
        record = env.fault_record;
    } else if (slab_->words[location.worker].payload_bytes[location.local] != 0) {
        try {
            record = read_payload(id);
        } catch (nb::python_error&) {  // unreadable: the fault has no text
        }
    }
    return event_types_[static_cast<std::size_t>(Event::ENV_FAILED)](id, kind, record, slab_->worker_of[location.worker], *env.ticket, env.begins_episode(), was_at_reset(id));
}

// Drops the results of envs that are done.
void PoolState::discard_results(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage, received;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        unclaimed_.release(id);
        if (envs_[id].phase() != EnvPhase::PENDING || !is_done(id)) continue;
        if (has_fault(id)) mark_faulted(id);
        else received.push_back(id);
    }
    mark_received(received, std::move(pending_), false);
    std::erase_if(pending_, [&](std::uint32_t id) { return envs_[id].phase() != EnvPhase::PENDING; });
}

bool PoolState::was_at_reset(std::uint32_t env_id) const {
    const ServerLocation location = slab_->server_locations[envs_.at(env_id).server];
    const WorkerControl& control = *slab_->workers[location.worker];
    const auto running = static_cast<Activity>(control.own.running.load(std::memory_order_acquire));
    if (running != Activity::GIVEN_UP && control.own.current.load(std::memory_order_acquire) == location.local) return running != Activity::STEP;
    return get_command(slab_->words[location.worker], location.local) == Command::RESET;
}

// ---- ends of episodes -------------------------------------------------------------------------------------------

bool PoolState::is_ended(std::uint32_t id) const {
    return !is_batched_ && !envs_[id].uses_staged() && *slab_->over(row_of(id)) != 0;
}

// Whether all rows of a batched env have ended, so that its next step begins new episodes and there is nothing to cut short.
bool PoolState::resets_itself(std::uint32_t id, bool is_received) const {
    return is_batched_ && autoreset_ == Autoreset::NEXT_STEP && have_all_ended(id, is_received);
}

bool PoolState::have_all_ended(std::uint32_t id, bool is_received) const {
    if (!is_received && envs_[id].uses_staged()) return false;  // its next result is the first of an episode, and is in the staging row
    const std::uint8_t* over = is_batched_ && is_received ? ended_.data() + row_of(id) : slab_->over(row_of(id));
    return std::all_of(over, over + batch_size_, [](std::uint8_t flag) { return flag != 0; });
}

// Records which rows ended, since a worker that dies in the next command may have half written the slab.
void PoolState::record_ended_rows(std::uint32_t id, bool is_cut) {
    std::uint8_t* ended = ended_.data() + row_of(id);
    if (is_cut) std::fill_n(ended, batch_size_, std::uint8_t{1});
    else std::copy_n(slab_->over(row_of(id)), batch_size_, ended);
}

// Marks each row as truncated, except rows of a batched env that had ended before: their next episode begins one result later.
void PoolState::mark_truncated(std::uint32_t id) {
    const bool goes_on = is_reset_after_cut(envs_[id]);  // the agents are alive in the next episode
    for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) {
        const Column& flags = slab_->plan.outcome.truncated;
        const Column& alive = slab_->plan.outcome.alive;
        const std::uint8_t* before = was_alive_.data() + row * alive.row_bytes;
        slab_->clear_outcome(row);
        if (!goes_on) slab_->clear_info(row);
        if (is_batched_ && ended_[row] && autoreset_ != Autoreset::SAME_STEP) {
            std::memset(slab_->alive(row), 0, alive.row_bytes);
            continue;
        }
        std::memset(slab_->truncated(row), 1, flags.row_bytes);
        const bool is_any = std::any_of(before, before + alive.row_bytes, [](std::uint8_t flag) { return flag != 0; });
        if (is_any) std::memcpy(slab_->truncated(row), before, alive.row_bytes);  // dead agents do not end twice
        std::memset(slab_->alive(row), goes_on, alive.row_bytes);
        *slab_->over(row) = 1;
    }
}

// ---- episodes that are cut short --------------------------------------------------------------------------------

// Does the part of cutting short that needs memory, before anything changes: SAME_STEP returns the last observation in the info.
void PoolState::store_final_obs(const Ids& ids) {
    if (autoreset_ != Autoreset::SAME_STEP) return;
    for (const std::uint32_t id : ids) {
        EnvRecord& env = envs_[id];
        if ((env.object() == ObjectPhase::LOST || env.is_cut()) && !env.final_obs) env.final_obs = env_obs(id, env.opaques, false);
    }
}

// Ends the episode of a pending env. NEXT_STEP and DISABLED have the result at once, with the last good observation. SAME_STEP returns
// the first observation of the next episode, so the result waits for a reset, unless there is no next episode.
void PoolState::cut_short(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    if (env.object() == ObjectPhase::LOST) env.cut_info = std::move(env.lost_info);
    envs_.move(id, ObjectPhase::RENEWED);
    // The slab may have sums of an episode that ended before; sums of the current one may be half written by a worker that died.
    for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) {
        if (ended_[row] != 0) slab_->clear_episode(row);
    }
    if (is_reset_after_cut(env)) return;  // store_final_obs() has prepared it
    const ServerLocation location = slab_->server_locations[env.server];
    slab_->words[location.worker].fault[location.local].store(0, std::memory_order_relaxed);
    keep_latest(env);
}

void PoolState::empty_row(std::uint32_t id) {
    slab_->clear_outcome(row_of(id));
    slab_->clear_info(row_of(id));
    std::memset(slab_->alive(row_of(id)), 0, slab_->plan.outcome.alive.row_bytes);
}

// Skips an exhausted env in a step of all: no command, and an empty row.
void PoolState::mask(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    env.command.kind = Command::NONE;
    empty_row(id);
    keep_latest(env);
}

// Of an env that has a fault, or cannot be replayed. A reset that is cut short is tried again instead.
void PoolState::resolve_fault(Decision& decision) {
    const std::uint32_t id = decision.id;
    EnvRecord& env = envs_[id];
    if (decision.remedy == Remedy::RAISE) return mark_faulted(id);
    if (decision.remedy == Remedy::KEEP) return suspend(id, std::move(decision.replays[0]));
    if (env.is_suspended()) {
        resume_with_fault(id);
        if (!env.is_commanded()) return mark_lost(decision.ids, decision.info);
    }
    if (env.begins_episode()) return retry_reset(id);
    const auto [words, local] = slab_->server_words(env.server);
    if (env.command.begins != Begins::EPISODE_OF_EACH_ROW) {
        if (!env.is_cut()) env.cut_info = std::move(decision.info);  // the first cause is reported
        if (!env.final_obs) env.final_obs = std::move(decision.final_obs);
        cut_short(id);
        if (!is_reset_after_cut(env)) return;
    }
    begin_episode(id);
    set_command(words, local, Command::RESET);
    record_command(id, words, local, Command::STEP);
    issue(id, Command::RESET, env.target);
}

// The outstanding command begins an episode: gives it again, with the same seed.
void PoolState::retry_reset(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    const auto [words, local] = slab_->server_words(env.server);
    const bool is_automatic = get_command(words, local) == Command::STEP;
    if (is_automatic) words.flags[local] = 0;
    if (!(words.flags[local] & FLAG_SEED) && env.has_seed && seeding_ != Seeding::CONTINUE) words.set_episode(local, env.base_seed, env.episode);
    envs_.move(id, ObjectPhase::CURRENT);
    issue(id, Command::RESET, env.target);
}

// Gives another command to a pending env, in place of the one it has.
void PoolState::issue(std::uint32_t id, Command command, std::uint32_t slot) {
    EnvRecord& env = envs_[id];
    if (env.uses_staged()) discard_staged(id);  // the new command writes to the env's own row
    commands_.write(slab_->server_locations[env.server], row_of(id), command, slot);
    commands_.issue(env.server);
    scanned_ = 0;
}

// Turns the words of a step into those of a reset, with the seed that the next episode would have.
void PoolState::begin_episode(std::uint32_t id) {
    const EnvRecord& env = envs_[id];
    const auto [words, local] = slab_->server_words(env.server);
    envs_.move(id, ObjectPhase::CURRENT);
    if (spares_.has_spares()) {
        spares_.write_next_seed(env.server);
        return;
    }
    words.flags[local] = autoreset_ == Autoreset::SAME_STEP ? FLAG_AUTO : 0;
    if (env.has_seed && (seeding_ != Seeding::CONTINUE || env.is_recycled)) words.set_episode(local, env.base_seed, env.episode + 1);
}

// ---- dead workers -----------------------------------------------------------------------------------------------

// The objects of these envs are gone, or in a state that the user does not expect: the next step of idle envs is cut short.
void PoolState::mark_lost(const Ids& ids, const nb::object& info) {
    for (const std::uint32_t id : ids) {
        EnvRecord& env = envs_[id];
        if (env.is_masked() || env.is_suspended() || env.object() == ObjectPhase::GONE) continue;
        if (env.phase() == EnvPhase::PENDING && (!is_done(id) || has_fault(id))) {
            if (env.object() == ObjectPhase::CURRENT) envs_.move(id, ObjectPhase::DOOMED);
            env.lost_info = info;
            continue;
        }
        if (env.phase() != EnvPhase::IDLE && env.phase() != EnvPhase::PENDING) continue;
        if (spares_.is_staged(env.server) && env.phase() == EnvPhase::IDLE) {
            if (!is_done(id)) continue;  // its worker's successor runs the reset
            spares_.discard_staged(env.server);
        }
        // Under SAME_STEP no env is between episodes: the result that ends one begins the next.
        const bool is_between = is_ended(id) || resets_itself(id, env.phase() == EnvPhase::IDLE) || env.is_cut();
        if (is_between && autoreset_ != Autoreset::SAME_STEP) {
            envs_.move(id, ObjectPhase::RENEWED);
            continue;
        }
        envs_.move(id, ObjectPhase::LOST);
        env.lost_info = info;
    }
}

// A worker may have finished a command before it was restarted: the env has that result, but its object is gone.
void PoolState::mark_lost_late(const Ids& ids) {
    for (const std::uint32_t id : ids) {
        const EnvRecord& env = envs_[id];
        if (env.object() == ObjectPhase::DOOMED && commands_.is_from_before_restart(env.server)) mark_lost({id}, nb::object(env.lost_info));
    }
}

// ---- restarts of workers -----------------------------------------------------------------------------------------

// Whether the object of a server could be replaced now without a loss. Under SAME_STEP an episode may have begun, but no step was sent: its
// reset is replayed.
bool PoolState::is_between_episodes(std::uint32_t server) const {
    const std::uint32_t id = spares_.env_of(server);
    if (id == NO_ENV) return true;
    const EnvRecord& env = envs_[id];
    if (env.phase() == EnvPhase::PENDING || env.is_suspended() || unclaimed_.is_unclaimed(id)) return false;
    if (autoreset_ == Autoreset::SAME_STEP) return env.phase() == EnvPhase::NEW || (log_.of(id).is_whole && log_.of(id).length == 1);
    if (env.phase() != EnvPhase::IDLE) return true;
    return spares_.is_staged(server) || env.object() == ObjectPhase::RENEWED || is_ended(id) || (is_batched_ && have_all_ended(id));
}

std::uint64_t PoolState::num_ended(std::uint32_t worker) const {
    std::uint64_t total = 0;
    for (const std::uint32_t lane : lanes_of(worker)) total += slab_->workers[lane]->own.num_ended.load(std::memory_order_relaxed);
    return total;
}

// Adds the workers that have played enough episodes or use too much memory, if none of their envs is in an episode.
void PoolState::add_workers_to_recycle(Ids& found) const {
    for (std::uint32_t worker = 0; worker < num_workers_; ++worker) {
        std::uint64_t resident_bytes = 0;
        bool is_between = !is_dead(worker) && !is_restarting(worker);
        for (const std::uint32_t lane : lanes_of(worker)) {
            resident_bytes = std::max<std::uint64_t>(resident_bytes, slab_->workers[lane]->own.resident_bytes.load(std::memory_order_relaxed));
        }
        if (!is_between || (num_ended(worker) < recycle_episodes_ && resident_bytes <= recycle_bytes_)) continue;
        for (const std::uint32_t lane : lanes_of(worker)) {
            is_between = is_between && std::ranges::all_of(slab_->plan.servers[lane], [&](std::uint32_t server) { return is_between_episodes(server); });
        }
        if (is_between) found.push_back(worker);
    }
}

// Commands wait until finish_restart(): the old worker may still live, the successor may fail although it serves, and repeated calls
// come first.
void PoolState::begin_restart(Decision& decision) {
    if (decision.remedy == Remedy::RAISE) fail_worker(decision);
    process_words(decision.id).learner.num_recycles += decision.is_recycling;
    const bool is_replayed = decision.remedy == Remedy::KEEP;
    for (const std::uint32_t lane : lanes_of(decision.id)) {
        commands_.begin_restart(lane);
        for (const std::uint32_t server : slab_->plan.servers[lane]) {
            const std::uint32_t id = spares_.env_of(server);
            const bool is_taken = id != NO_ENV && envs_[id].phase() == EnvPhase::PENDING;
            if ((is_replayed || decision.is_recycling) && !is_taken) spares_.stage_again(server);
        }
    }
    if (decision.remedy == Remedy::CUT) mark_lost(decision.ids, decision.info);
    for (std::size_t i = 0; i < decision.ids.size(); ++i) {
        const std::uint32_t id = decision.ids[i];
        EnvRecord& env = envs_[id];
        env.is_recycled = decision.is_recycling;
        if (env.is_suspended()) envs_.move(id, ObjectPhase::AWAITING_REPLAY);  // its replay will start from the beginning
        if (is_replayed && has_episode(id) && !env.begins_episode_next() && !env.is_suspended()) suspend(id, std::move(decision.replays[i]));
        if (!is_replayed && env.is_suspended()) resume_with_fault(id);
    }
}

void PoolState::clear_dead_worker(std::uint32_t worker) {
    if (!slab_) return;
    if (reaper_ != nullptr) reaper_->declare_dead(worker);
    for (const std::uint32_t lane : lanes_of(worker)) {
        spares_.mark_rebuilt(lane);
        commands_.rewrite_control_words(lane, is_closed_.load());
        free_overflow(lane);
    }
}

// Its successor serves the slab.
void PoolState::finish_restart(Decision& decision) {
    mark_lost_late(decision.ids);
    for (const std::uint32_t lane : lanes_of(decision.id)) {
        commands_.end_restart(lane);
        commands_.check_deaths_of(lane);
        slab_->workers[lane]->learner.pid.store(decision.pid);
    }
    ++process_words(decision.id).learner.num_restarts;
}

// There is no successor: pending commands become faults.
void PoolState::cancel_restart(Decision& decision) {
    for (const std::uint32_t lane : lanes_of(decision.id)) commands_.end_restart(lane);
    for (const std::uint32_t id : decision.ids) {
        if (envs_[id].is_suspended()) resume_with_fault(id);
    }
    for (const std::uint32_t lane : lanes_of(decision.id)) commands_.check_deaths_of(lane);
}

// The worker stays dead, or is restarted for other envs: its idle envs are FAULTED until a reset or revive() restores them, and so are
// those with a result, once it is received. If it stays dead, its death is raised for the commands that it lost.
void PoolState::fail_worker(Decision& decision) {
    cancel_restart(decision);
    for (const std::uint32_t id : decision.ids) {
        const EnvRecord& env = envs_[id];
        if (env.phase() == EnvPhase::IDLE || env.phase() == EnvPhase::NEW) envs_.fail(id);
        if (env.is_commanded()) envs_.move(id, ObjectPhase::GONE);
        if (decision.kind != Decision::Kind::FAIL_WORKER || !is_lost(id)) continue;
        count_fault(id, env.fault->load(std::memory_order_relaxed));
        mark_faulted(id);
    }
}

// Frees a dead lane's values that nobody will read. Its successor writes behind the others.
void PoolState::free_overflow(std::uint32_t lane) {
    std::vector<OverflowRef> kept;
    for (std::uint32_t id = 0; id < num_envs_; ++id) {
        const ServerLocation location = slab_->server_locations[envs_[id].server];
        const ServerWords& words = slab_->words[location.worker];
        const bool is_awaited = envs_[id].phase() == EnvPhase::PENDING && is_done(id) && (words.result[location.local] & RESULT_REMOTE);
        if (location.worker == lane && is_awaited) kept.push_back({words.payload_offset[location.local], words.payload_bytes[location.local], 0});
    }
    free_all_but(slab_->result_fds.at(lane).number(), std::move(kept));
}

}  // namespace stepmill
