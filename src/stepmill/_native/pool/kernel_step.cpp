// A step of all envs of a kernel that are in the same state: writes no commands and no records of envs.
//
//     uniform   every env is idle, and all have their newest results in the same slot
//     stale     the records still have the slots of an earlier step; sync_records() updates them
#define NO_IMPORT_ARRAY
#include "kernel/kernel_loop.hpp"
#include "pool/pool_state.hpp"

namespace stepmill {

void PoolState::attach_kernel(nb::object loop) {
    kernel_ = nb::cast<KernelLoop*>(loop);
    commands_.attach_advance(loop.attr("advance"));
    kernel_object_ = std::move(loop);
    // With any of these options, each step must read or write the records of the envs.
    may_be_uniform_ = autoreset_ == Autoreset::NEXT_STEP && budget_ == 0 && !tracks_episodes_ && !spares_.has_spares();
}

// Called when a batch of all envs has been received.
void PoolState::find_uniform_slot() {
    uniform_slot_ = NO_SLOT;
    if (!may_be_uniform_ || unclaimed_.is_any() || !suspended_.empty()) return;
    for (const EnvRecord& env : envs_) {
        if (env.phase() != EnvPhase::IDLE || env.object() != ObjectPhase::CURRENT || env.latest != envs_[0].latest) return;
    }
    uniform_slot_ = envs_[0].latest;
}

void PoolState::sync_records() {
    for (EnvRecord& env : envs_) env.latest = static_cast<std::uint8_t>(uniform_slot_);
    are_records_stale_ = false;
}

// Steps all envs without commands. Returns null, and does nothing, if the step needs commands.
nb::object PoolState::step_uniform(nb::handle actions) {
    if (unclaimed_.is_any() || !kernel_->is_soon_done()) return {};
    write_all_actions(actions);
    const auto slot = static_cast<std::uint32_t>(find_common_slot(true));  // not -1, since all newest results are in one slot
    add_to(slab_->pool->own.counters.num_sends, 1);
    if (!run_kernel(slot)) return write_commands_after(slot), nb::none();
    leases_->unpin(static_cast<std::uint32_t>(uniform_slot_), num_envs_);
    leases_->pin(slot, num_envs_);
    uniform_slot_ = static_cast<int>(slot);
    are_records_stale_ = true;
    unclaimed_.remember(all_, {}, true);
    add_to(slab_->pool->own.counters.num_batches, 1);
    const SampledTime timed(gather_sampler_, slab_->pool->own.counters.gather_ns, unclaimed_time_, TraceKind::GATHER, slab_->learner_trace());
    return gather_columns(all_, {}, nullptr, false);
}

bool PoolState::run_kernel(std::uint32_t slot) {
    const SampledTime timed(run_sampler_, slab_->pool->own.counters.wait_ns, unclaimed_time_, TraceKind::WAIT, slab_->learner_trace());
    return kernel_->step_all(slot);
}

// Writes the commands of a step that is done and in which an env failed, so that the faults are handled as after any other step.
void PoolState::write_commands_after(std::uint32_t slot) {
    if (are_records_stale_) sync_records();
    uniform_slot_ = NO_SLOT;
    for (const std::uint32_t id : all_) {
        EnvRecord& env = envs_[id];
        const ServerLocation location = slab_->server_locations[env.server];
        envs_.move(id, EnvPhase::PENDING);
        env.command.kind = Command::STEP;
        env.target = static_cast<std::uint8_t>(slot);
        leases_->pin(slot);
        pending_.push_back(id);
        slab_->words[location.worker].flags[location.local] = 0;
        commands_.write(location, row_of(id), Command::STEP, slot);
        record_command(id, slab_->words[location.worker], location.local, Command::STEP);
        commands_.add(env.server, location);
    }
    kernel_->finish_all();
}

}  // namespace stepmill
