// Decisions of Python: apply() prepares all of them, and then commits those that are not stale.
#define NO_IMPORT_ARRAY
#include <algorithm>

#include <nanobind/stl/vector.h>

#include "pool/pool_state.hpp"
#include "shared/reaper.hpp"

namespace stepmill {

// Carries out decisions in their order. Everything that can fail happens before anything changes. Returns how many were stale: their env or
// worker has moved on since the event, so they are dropped.
std::uint32_t PoolState::apply(nb::handle decisions) {
    using Commit = void (PoolState::*)(Decision&);
    static constexpr Commit COMMITS[] = {&PoolState::resolve_fault, &PoolState::mark_new, &PoolState::begin_replay, &PoolState::continue_replay,
                                         &PoolState::begin_restart, &PoolState::finish_restart, &PoolState::cancel_restart, &PoolState::fail_worker};
    const InUse in_use(*this);
    std::vector<Decision> prepared;
    for (nb::handle each : decisions) prepared.push_back(prepare(each));
    std::uint32_t num_stale = 0;
    for (Decision& decision : prepared) {
        const Commit commit = COMMITS[static_cast<std::size_t>(decision.kind)];
        if (is_stale(decision)) ++num_stale;
        else (this->*commit)(decision);
    }
    std::erase_if(pending_, [&](std::uint32_t id) { return envs_[id].phase() != EnvPhase::PENDING; });
    scanned_ = 0;
    return num_stale;
}

Decision PoolState::prepare(nb::handle object) {
    const nb::handle type = object.type();
    const auto found = std::ranges::find_if(decision_types_, [&](const nb::object& each) { return each.is(type); });
    if (found == decision_types_.end()) raise(errors().bug, std::string("apply() knows no decision ") + nb::str(type).c_str() + "; please report this bug");
    const auto number = [&](const char* name) { return nb::cast<std::uint32_t>(object.attr(name)); };
    Decision decision;
    decision.kind = static_cast<Decision::Kind>(found - decision_types_.begin());
    decision.id = number(decision.is_of_env() ? "env_id" : "worker");
    if (decision.id >= (decision.is_of_env() ? num_envs_ : num_workers_)) throw std::out_of_range(std::string(nb::str(object).c_str()) + " does not exist");
    if (decision.kind != Decision::Kind::MARK_NEW) decision.key = number(decision.is_of_env() ? "ticket" : "generation");
    decision.ids = decision.is_of_env() ? Ids{decision.id} : spares_.envs_of(decision.id);
    if (decision.kind == Decision::Kind::RESOLVE_FAULT || decision.kind == Decision::Kind::BEGIN_RESTART) {
        decision.info = object.attr("info");
        decision.remedy = static_cast<Remedy>(nb::cast<int>(object.attr("remedy")));
        for (const std::uint32_t id : decision.ids) decision.replays.push_back(decision.remedy == Remedy::KEEP ? make_replay(id) : nullptr);
    }
    switch (decision.kind) {
        case Decision::Kind::RESOLVE_FAULT: {
            const EnvRecord& env = envs_[decision.id];
            if (autoreset_ == Autoreset::SAME_STEP && !env.begins_episode() && !env.final_obs) decision.final_obs = env_obs(decision.id, env.opaques, false);
            break;
        }
        case Decision::Kind::REPLAY: {
            decision.places = nb::cast<Ids>(object.attr("places"));
            decision.is_finished_here = nb::cast<bool>(object.attr("is_finished_here"));
            const LoggedEpisode& episode = log_.complete(decision.id);
            if (episode.reset_blob && !envs_[decision.id].begins_episode()) commands_.write_blob(envs_[decision.id].server, episode.reset_blob);
            break;
        }
        case Decision::Kind::BEGIN_RESTART: decision.is_recycling = nb::cast<bool>(object.attr("is_recycling")); break;
        case Decision::Kind::SERVE_WORKER:
            decision.pid = number("pid");
            if (reaper_ != nullptr) reaper_->watch(decision.id, nb::cast<int>(object.attr("pidfd")));
            break;
        default: break;
    }
    return decision;
}

bool PoolState::is_stale(const Decision& decision) const {
    if (!decision.is_of_env()) {
        const bool needs_restart = decision.kind == Decision::Kind::SERVE_WORKER || decision.kind == Decision::Kind::CANCEL_RESTART;
        return process_words(decision.id).learner.num_restarts.load() != decision.key || (needs_restart && !is_restarting(decision.id));
    }
    const EnvRecord& env = envs_[decision.id];
    const bool has_result = env.phase() == EnvPhase::PENDING && is_done(decision.id);  // never of a suspended env
    if (decision.kind == Decision::Kind::MARK_NEW) return env.phase() != EnvPhase::FAULTED;
    if (*env.ticket != decision.key) return true;
    if (decision.kind == Decision::Kind::REPLAY) return !env.is_suspended();
    if (decision.kind == Decision::Kind::CONTINUE_REPLAY) return env.object() != ObjectPhase::PAUSED;
    switch (decision.remedy) {
        case Remedy::RAISE: return !has_result || !has_fault(decision.id);
        case Remedy::KEEP: return env.is_suspended();
        default: return !has_result && !env.is_suspended();
    }
}

}  // namespace stepmill
