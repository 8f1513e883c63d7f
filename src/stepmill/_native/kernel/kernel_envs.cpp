#include "kernel/kernel_envs.hpp"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

namespace stepmill {

namespace {

// One flag at a time: a load of both at once would wait until the kernel's two stores are in the cache.
bool read_flag(const std::uint8_t& flag) noexcept { return *static_cast<const volatile std::uint8_t*>(&flag) != 0; }

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) noexcept { counter.fetch_add(amount, std::memory_order_relaxed); }

}  // namespace

KernelEnvs::KernelEnvs(std::shared_ptr<Slab> slab, KernelPlan plan, std::uint32_t num_runners)
    : slab_(std::move(slab)), plan_(std::move(plan)), words_(slab_->words.at(0)), control_(slab_->workers.at(0)), num_envs_(static_cast<std::uint32_t>(slab_->plan.servers.at(0).size())), has_infos_(plan_.info_bytes != 0), progress_(num_runners) {
    if (slab_->plan.batch_size != 1 || !slab_->plan.outcome.is_plain()) throw std::invalid_argument("a kernel has one row per env, one number as reward, and no agents");
    if (slab_->plan.observation.size() != plan_.obs_offsets.size() || slab_->plan.action.size() != plan_.action_offsets.size()) throw std::invalid_argument("a kernel's leaves are not those of the slab");
    if (slab_->plan.info.size() != plan_.info_offsets.size() || plan_.final_offsets.size() != plan_.info_offsets.size()) throw std::invalid_argument("a kernel's infos are not those of the slab");
    if (plan_.final_payload.size() > slab_->plan.payload.row_bytes) throw std::invalid_argument("last infos do not fit the payload's row");
    std::size_t bytes = RECORD_BYTES + align_line(plan_.state_bytes);
    if (plan_.obs_offsets.size() != 1) obs_at_ = bytes, bytes += align_line(plan_.obs_bytes);
    if (plan_.action_offsets.size() != 1) action_at_ = bytes, bytes += align_line(plan_.action_bytes);
    stride_ = bytes;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(CACHE_LINE, stride_ * num_envs_)));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, stride_ * num_envs_);
    for (std::uint32_t local = 0; local < num_envs_; ++local) stepmill_rng_seed(&record(local).rng, derive_seed(plan_.entropy, local, 0));
}

// ---- one command ------------------------------------------------------------------------------------------------

void KernelEnvs::run(std::span<const std::uint32_t> envs, std::uint32_t runner) noexcept {
    std::uint32_t num_resets = 0, num_steps = 0;
    for (const std::uint32_t local : envs) {
        Outcome outcome;
        progress_[runner].begin(local);
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        put<std::uint8_t>(words_.result[local], 0);
        put<std::uint64_t>(words_.payload_bytes[local], 0);
        if (!run_env(local, {words_.row[local], words_.slot[local], words_.flags[local], get_command(words_, local) == Command::RESET}, outcome)) {
            add_fault(local, outcome);
            continue;
        }
        if (words_.fault[local].load(std::memory_order_relaxed) != 0) words_.fault[local].store(0, std::memory_order_relaxed);
        num_resets += outcome.is_reset, num_steps += outcome.is_step;
        // The release makes every byte of the result visible to who sees done == ticket.
        words_.done[local].store(ticket, std::memory_order_release);
    }
    progress_[runner].end();
    count(num_steps, num_resets);
}

void KernelEnvs::run_range(std::uint32_t first, std::uint32_t num, std::uint32_t runner) noexcept {
    std::uint32_t num_resets = 0, num_steps = 0;
    for (std::uint32_t local = first; local < first + num; ++local) {
        Outcome outcome;
        progress_[runner].begin(local);
        if (!run_env(local, {local, whole_slot_, 0, false}, outcome)) add_fault(local, outcome);
        num_resets += outcome.is_reset, num_steps += outcome.is_step;
    }
    progress_[runner].end();
    count(num_steps, num_resets);
}

void KernelEnvs::count(std::uint32_t num_steps, std::uint32_t num_resets) noexcept {
    if (num_resets != 0) add(control_->own.counters.num_resets, num_resets);
    if (num_steps != 0) add(control_->own.counters.num_steps, num_steps);
}

inline bool KernelEnvs::run_env(std::uint32_t local, const EnvCommand& command, Outcome& outcome) noexcept {
    KernelEnvRecord& env = record(local);
    ++env.num_commands;
    const bool is_due = env.needs_reset && plan_.autoreset == Autoreset::NEXT_STEP;
    void* const obs = obs_at_ != 0 ? record_bytes(local) + obs_at_ : slab_->base + slab_->plan.observation[0].at(command.slot, command.row);
    if (command.is_reset || is_due) {
        if (!begin_episode(local, command.is_reset ? command.flags : 0, obs, outcome)) return false;
        write_reset(local, command);
        env.needs_reset = 0;
    } else if (!step(local, command, obs, outcome)) {
        return false;
    }
    if (obs_at_ != 0) write_obs(slab_->plan.observation, command.slot, command.row, obs);
    if (has_infos_) [[unlikely]] write_infos(local, command.row);
    if (slab_->pool->own.hashing.load(std::memory_order_relaxed) != 0) write_hash(local, obs);
    return true;
}

// The generator is seeded as reset(seed=...) of an env in Python is: by the command, or by the pool's policy.
bool KernelEnvs::begin_episode(std::uint32_t local, std::uint8_t flags, void* obs, Outcome& outcome) noexcept {
    KernelEnvRecord& env = record(local);
    if (env.seeds.begin(flags, words_.seed[local], words_.episode[local], plan_.seeding)) stepmill_rng_seed(&env.rng, env.seeds.of(env_id(local), plan_.seeding));
    outcome.is_reset = true;
    if (has_infos_) [[unlikely]] std::memset(state(local), 0, plan_.info_bytes);
    outcome.result.reward = 0.0, outcome.result.terminated = outcome.result.truncated = 0, outcome.result.message[0] = 0;
    if (plan_.call == KernelCall::C) {
        outcome.status = reinterpret_cast<Reset>(plan_.reset)(state(local), &env.rng, obs, &outcome.result);
        return outcome.status == STEPMILL_OK;
    }
    std::int64_t returned = 0;
    outcome.status = reinterpret_cast<NumbaReset>(plan_.reset)(&returned, &outcome.raised, state(local), &env.rng, obs, &outcome.result);
    return outcome.status == STEPMILL_OK;
}

inline bool KernelEnvs::step(std::uint32_t local, const EnvCommand& command, void* obs, Outcome& outcome) noexcept {
    KernelEnvRecord& env = record(local);
    const void* const action = action_memory(local, command.row);
    stepmill_result& result = outcome.result;
    outcome.is_step = true;
    if (has_infos_) [[unlikely]] std::memset(state(local), 0, plan_.info_bytes);
    result.reward = 0.0, result.terminated = result.truncated = 0, result.message[0] = 0;
    if (plan_.call == KernelCall::C) {
        outcome.status = reinterpret_cast<Step>(plan_.step)(state(local), action, &env.rng, obs, &result);
    } else {
        std::int64_t returned = 0;
        outcome.status = reinterpret_cast<NumbaStep>(plan_.step)(&returned, &outcome.raised, state(local), action, &env.rng, obs, &result);
    }
    if (outcome.status != STEPMILL_OK) return false;
    const bool is_late = plan_.max_episode_steps != 0 && env.episode_length + 1 >= plan_.max_episode_steps;
    const bool is_terminated = read_flag(result.terminated), is_truncated = read_flag(result.truncated) || is_late;
    const bool is_over = is_terminated || is_truncated;
    put<std::uint8_t>(*slab_->terminated(command.row), is_terminated);
    put<std::uint8_t>(*slab_->truncated(command.row), is_truncated);
    write_step(local, command.row, result.reward, is_over);
    const bool is_last = (command.flags & FLAG_LAST) != 0;
    env.needs_reset = is_over && !is_last && plan_.autoreset != Autoreset::SAME_STEP;
    if (!is_over || plan_.autoreset != Autoreset::SAME_STEP) return true;
    end_same_step(local, command.row, obs);
    return is_last || begin_episode(local, 0, obs, outcome);
}

// The last observation goes to the final rows, the last infos to the payload. If another episode is to be played, its first ones take
// their place.
void KernelEnvs::end_same_step(std::uint32_t local, std::uint32_t row, const void* obs) noexcept {
    write_obs(slab_->plan.final_observation, 0, row, obs);
    words_.result[local] = RESULT_FINAL;
    auto* const payload = reinterpret_cast<std::byte*>(slab_->payload(row));
    std::memcpy(payload, plan_.final_payload.data(), plan_.final_payload.size());
    for (std::size_t leaf = 0; leaf < plan_.info_offsets.size(); ++leaf) {
        std::memcpy(payload + plan_.final_offsets[leaf], state(local) + plan_.info_offsets[leaf], slab_->plan.info[leaf].row_bytes);
    }
    words_.payload_bytes[local] = plan_.final_payload.size();
}

void KernelEnvs::write_reset(std::uint32_t local, const EnvCommand& command) noexcept {
    slab_->clear_outcome(command.row);
    record(local).episode_return = 0.0, record(local).episode_length = 0;
    const bool is_stand_in = plan_.autoreset == Autoreset::SAME_STEP && (command.flags & FLAG_AUTO);
    if (!is_stand_in) slab_->clear_episode(command.row);
}

inline void KernelEnvs::write_step(std::uint32_t local, std::uint32_t row, double reward, bool is_over) noexcept {
    KernelEnvRecord& env = record(local);
    *reinterpret_cast<double*>(slab_->reward(row)) = reward;
    put<std::uint8_t>(*slab_->over(row), is_over);
    *slab_->episode_return(row) = env.episode_return += reward;
    *slab_->episode_length(row) = ++env.episode_length;
    if (is_over) env.episode_return = 0.0, env.episode_length = 0;
}

// ---- rows -------------------------------------------------------------------------------------------------------

void KernelEnvs::write_obs(const std::vector<Column>& columns, std::uint32_t slot, std::uint32_t row, const void* obs) const noexcept {
    for (std::size_t leaf = 0; leaf < columns.size(); ++leaf) {
        std::memcpy(slab_->base + columns[leaf].at(slot, row), static_cast<const std::byte*>(obs) + plan_.obs_offsets[leaf], columns[leaf].row_bytes);
    }
}

void KernelEnvs::write_infos(std::uint32_t local, std::uint32_t row) noexcept {
    for (std::size_t leaf = 0; leaf < plan_.info_offsets.size(); ++leaf) {
        const Column& column = slab_->plan.info[leaf];
        std::memcpy(slab_->base + column.at(0, row), state(local) + plan_.info_offsets[leaf], column.row_bytes);
    }
}

const void* KernelEnvs::action_memory(std::uint32_t local, std::uint32_t row) noexcept {
    const std::vector<Column>& columns = slab_->plan.action;
    if (action_at_ == 0) return slab_->base + columns[0].at(0, row);
    std::byte* const target = record_bytes(local) + action_at_;
    for (std::size_t leaf = 0; leaf < columns.size(); ++leaf) std::memcpy(target + plan_.action_offsets[leaf], slab_->base + columns[leaf].at(0, row), columns[leaf].row_bytes);
    return target;
}

// What a replay is compared with.
void KernelEnvs::write_hash(std::uint32_t local, const void* obs) noexcept {
    std::uint64_t hash = 0xff51afd7ed558ccdu;
    const auto* bytes = static_cast<const std::byte*>(obs);
    for (std::size_t at = 0; at < plan_.obs_bytes; at += sizeof hash) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes + at, std::min(sizeof word, plan_.obs_bytes - at));
        hash = std::rotl((hash ^ word) * 0x9e3779b97f4a7c15u, 29);
    }
    put(words_.hash[local], static_cast<ObsHash>(hash ^ hash >> 32));
}

// ---- faults -----------------------------------------------------------------------------------------------------

// The pool's thread makes the record, for which it needs Python, and publishes it.
void KernelEnvs::add_fault(std::uint32_t local, const Outcome& outcome) noexcept {
    const std::lock_guard guard(faults_lock_);
    const char* const text = outcome.result.message;
    faults_.push_back({local, outcome.is_reset, outcome.status, outcome.raised, std::string(text, strnlen(text, STEPMILL_MESSAGE_BYTES))});
    num_faults_.fetch_add(1, std::memory_order_release);
}

std::vector<KernelFault> KernelEnvs::pop_faults() {
    const std::lock_guard guard(faults_lock_);
    num_faults_.store(0, std::memory_order_relaxed);
    return std::exchange(faults_, {});
}

// ---- saved memory: the record, then the saved part of the state --------------------------------------------------

void KernelEnvs::save(std::uint32_t local, std::byte* target) noexcept {
    std::memcpy(target, record_bytes(local), sizeof(KernelEnvRecord));
    std::memcpy(target + sizeof(KernelEnvRecord), state(local), plan_.saved_bytes);
}

void KernelEnvs::restore(std::uint32_t local, const std::byte* source) noexcept {
    std::memcpy(record_bytes(local), source, sizeof(KernelEnvRecord));
    std::memcpy(state(local), source + sizeof(KernelEnvRecord), plan_.saved_bytes);
}

}  // namespace stepmill
