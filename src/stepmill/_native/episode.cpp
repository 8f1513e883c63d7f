// What the books say of one env's episode, for who writes a crash capsule or compares a replay.
#define NO_IMPORT_ARRAY
#include "ledger.hpp"
#include "seeds.hpp"

namespace stepmill {

namespace {

nb::bytes bytes_of(const std::vector<std::byte>& bytes) { return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }

}  // namespace

// The seed that an env's reset was given; None where its own generator went on.
nb::object Ledger::seed_of(std::uint32_t id, std::uint64_t episode) const {
    const EnvBook& env = envs_[id];
    if (!env.has_seed || (seeding_ == Seeding::CONTINUE && episode != 0)) return nb::none();
    return nb::int_(seed_of_episode(seeding_ == Seeding::FIXED, env.base_seed, env.server, episode));
}

// The log of the newest episode, and the command under way. A reset under way has begun an episode in the books; the log is still
// the one of the episode before, and worth something only if that ended by itself.
// Called by the pool's thread, between its other calls.
nb::dict Ledger::episode_log(std::uint32_t env_id) {
    take_log(env_id);
    const EnvBook& env = envs_.at(env_id);
    const Seat seat = slab_->seats[env.server];
    const bool is_pending = env.status == EnvStatus::PENDING;
    const bool begins = is_pending && env.is_reset;
    const bool is_explicit = begins && get_command(slab_->words[seat.worker], seat.local) == Command::RESET;
    const bool is_whole = env.log.is_whole && !is_explicit;
    const std::uint64_t episode = begins && !is_explicit && env.episode != 0 ? env.episode - 1 : env.episode;

    std::vector<std::byte> action(action_bytes());
    if (env.replay) action = env.replay->action;  // the row is in use
    else copy_action(env_id, action.data(), true);
    nb::list rewards, flags, hashes;
    for (const Outcome& outcome : env.log.outcomes) {
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
    const nb::object& blob = is_explicit ? env.log.next_blob : env.log.blob;
    log["blob"] = blob ? blob : nb::none();
    log["actions"] = bytes_of(is_whole ? env.log.actions : std::vector<std::byte>());
    log["action"] = bytes_of(action);
    log["rewards"] = rewards, log["flags"] = flags, log["hashes"] = hashes;
    return log;
}

nb::tuple Ledger::newest_outcome(std::uint32_t env_id) const {
    const Outcome outcome = outcome_of(env_id);
    return nb::make_tuple(outcome.reward, static_cast<int>(outcome.flags), outcome.hash);
}

// Which env a worker was at when it was last heard of, or -1.
int Ledger::running_env(std::uint32_t worker) const {
    if (!slab_) return -1;
    const std::uint32_t local = slab_->workers.at(worker)->current.load(std::memory_order_acquire);
    if (local >= slab_->plan.servers[worker].size()) return -1;
    const std::uint32_t server = slab_->plan.servers[worker][local];
    for (std::uint32_t id = 0; id < num_envs_; ++id) {
        if (envs_[id].server == server) return static_cast<int>(id);
    }
    return -1;
}

}  // namespace stepmill
