// Results that are no results: faults are listed, told of and dropped here. What becomes of their envs: recovery.cpp.
#define NO_IMPORT_ARRAY
#include <algorithm>

#include "ledger.hpp"

namespace stepmill {

void Ledger::mark_faulted(std::uint32_t id) {
    book_->unpin(envs_[id].target);
    if (envs_[id].is_taking) drop_staged(id);
    envs_[id].status = EnvStatus::FAULTED;
}

nb::list Ledger::take_faults() {
    const InUse in_use(*this);
    nb::list faults;
    for (const std::uint32_t id : pending_) {
        if (!is_done(id) || !has_fault(id)) continue;
        const Seat seat = slab_->seats[envs_[id].server];
        const auto kind = envs_[id].fault->load(std::memory_order_relaxed);
        nb::object record = nb::none();  // the dead leave none
        if (envs_[id].fault_record && envs_[id].recorded_ticket == envs_[id].ticket) {
            record = envs_[id].fault_record;
        } else if (slab_->words[seat.worker].payload_bytes[seat.local] != 0) {
            try {
                record = read_payload(id);
            } catch (nb::python_error&) {  // unreadable: the fault is told without its words
            }
        }
        faults.append(nb::make_tuple(id, kind, record, seat.worker, envs_[id].ticket, envs_[id].is_reset, was_at_reset(id)));
    }
    return faults;
}

void Ledger::fail(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::PENDING && is_done(id) && has_fault(id)) mark_faulted(id);
    }
    std::erase_if(pending_, [&](std::uint32_t id) { return envs_[id].status != EnvStatus::PENDING; });
    scanned_ = 0;
}

// Drops the results of envs that are done, as if they had been received.
void Ledger::discard(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage, done, done_ids;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].is_kept) release_kept(id);
        if (envs_[id].status == EnvStatus::PENDING && is_done(id)) done.push_back(id);
    }
    for (const std::uint32_t id : done) {
        if (has_fault(id)) mark_faulted(id);
        else done_ids.push_back(id);
    }
    Ids rest = pending_;
    std::erase_if(rest, [&](std::uint32_t id) { return envs_[id].status != EnvStatus::PENDING || std::ranges::count(done_ids, id) != 0; });
    settle(done_ids, std::move(rest), false);
}

bool Ledger::was_at_reset(std::uint32_t env_id) const {
    const Seat seat = slab_->seats[envs_.at(env_id).server];
    const WorkerControl& control = *slab_->workers[seat.worker];
    const auto running = static_cast<Activity>(control.running.load(std::memory_order_acquire));
    if (control.current.load(std::memory_order_acquire) == seat.local) return running != Activity::STEP;
    return get_command(slab_->words[seat.worker], seat.local) == Command::RESET;
}

// The reaper need not have heard of it yet.
bool Ledger::died_in_request(std::uint32_t worker) const {
    if (!slab_) return true;  // closed meanwhile
    const WorkerControl& control = *slab_->workers.at(worker);
    return control.serving.load(std::memory_order_acquire) != 0 && control.current.load(std::memory_order_acquire) == NO_SERVER;
}

}  // namespace stepmill
