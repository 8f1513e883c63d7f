#define NO_IMPORT_ARRAY
#include "pool/spare_queue.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <nanobind/stl/vector.h>

#include "shared/seeds.hpp"

namespace stepmill {

SpareQueue::SpareQueue(Slab& slab, CommandWriter& commands, std::uint32_t num_envs, Seeding seeding)
    : slab_(slab), commands_(commands), num_envs_(num_envs), num_spares_(static_cast<std::uint32_t>(slab.server_locations.size()) - num_envs), seeding_(seeding), records_(slab.server_locations.size()) {
    reset_server_order();
}

// ---- which server serves which env ------------------------------------------------------------------------------

void SpareQueue::reset_server_order() {
    queue_.clear();
    for (std::uint32_t server = 0; server < records_.size(); ++server) {
        records_[server].env = server < num_envs_ ? server : NO_ENV;
        if (server >= num_envs_) queue_.push_back(server);
    }
}

std::vector<std::uint32_t> SpareQueue::envs_of(std::uint32_t worker) const {
    std::vector<std::uint32_t> ids;
    for (const std::uint32_t lane : slab_.lanes.at(worker)) {
        for (const std::uint32_t server : slab_.plan.servers[lane]) {
            if (records_[server].env != NO_ENV) ids.push_back(records_[server].env);
        }
    }
    std::ranges::sort(ids);
    return ids;
}

// Whether the staged episode is lost: its object died with its worker, and no successor has begun it again.
bool SpareQueue::is_gone(std::uint32_t server) const {
    const std::uint32_t lane = slab_.server_locations[server].worker;
    const bool is_dead = commands_.is_restarting(lane) || slab_.workers[lane]->learner.dead.load(std::memory_order_acquire) != 0;
    return is_dead && records_[server].deferred.empty() && commands_.is_done(server);
}

std::uint32_t SpareQueue::swap_in(std::uint32_t finished) {
    const std::uint32_t env = std::exchange(records_[finished].env, NO_ENV);
    queue_.push_back(finished);
    draw_seed(finished);
    stage(finished);
    const std::uint32_t next = queue_.front();
    queue_.pop_front();
    records_[next].env = env;
    const bool was_staged = records_[next].is_staged;
    if (!was_staged) draw_seed(next);
    if (!was_staged || is_gone(next)) {
        stage(next);
        records_[next].num_begun -= was_staged;  // the same episode again
    }
    return next;
}

// ---- resets ahead of their time ---------------------------------------------------------------------------------

void SpareQueue::draw_seed(std::uint32_t server) {
    Record& record = records_[server];
    record.is_drawn = true;
    record.next.has_seed = false;
    if (seeding_ == Seeding::PER_EPISODE && has_pool_seed_) {
        record.next = {true, derive_seed(pool_seed_, num_envs_, num_drawn_++)};
    } else if (seeding_ == Seeding::FIXED && record.has_own_seed) {
        record.next = {true, record.own_seed};
    }
}

void SpareQueue::write_next_seed(std::uint32_t server) {
    Record& record = records_[server];
    if (!record.is_drawn) draw_seed(server);
    record.is_drawn = false;
    write_seed(slab_.server_locations[server], record.next);
}

void SpareQueue::write_seed(ServerLocation location, ResetSeed seed) const {
    const ServerWords& words = slab_.words[location.worker];
    words.flags[location.local] = static_cast<std::uint8_t>(FLAG_AUTO | (seed.has_seed ? FLAG_SEED : 0));
    words.seed[location.local] = seed.seed;
}

// Records an explicit reset, and draws its seed if none was given. is_new_count: a given seed restarts the sequence of seeds.
void SpareQueue::record_explicit_reset(std::uint32_t server, bool is_new_count, bool is_drawn) {
    Record& record = records_[server];
    const auto [words, local] = slab_.server_words(server);
    const bool is_given = (words.flags[local] & FLAG_SEED) != 0;
    if (is_given) {
        record.own_seed = words.seed[local];
        record.has_own_seed = true;
        if (is_new_count || !has_pool_seed_) pool_seed_ = record.own_seed, has_pool_seed_ = true, num_drawn_ = 0;
    } else if (seeding_ != Seeding::CONTINUE && is_drawn) {
        draw_seed(server);
        if (!record.next.has_seed) return;
        words.seed[local] = record.next.seed;
        words.flags[local] |= FLAG_SEED;
    }
    record.is_drawn = false;
}

void SpareQueue::mark_rebuilt(std::uint32_t lane) {
    for (const std::uint32_t server : slab_.plan.servers[lane]) {
        records_[server].is_rebuilt = records_[server].is_staged && commands_.is_done(server);
        has_deferred_ |= records_[server].is_rebuilt;
    }
}

// Resets a server with the seed that it has drawn, after a reset that still runs there.
void SpareQueue::stage(std::uint32_t server) {
    Record& record = records_[server];
    record.is_staged = true;
    record.is_rebuilt = false;
    ++record.num_begun;
    commands_.run_outstanding(server);
    const bool is_idle = record.deferred.empty() && commands_.is_done(server);
    commands_.reserve_ticket(server);
    if (is_idle) {
        publish_stage(server, record.next);
        return;
    }
    // Queue every reset: how often an env was reset may affect what it does next.
    record.deferred.push_back(record.next);
    has_deferred_ = true;
}

void SpareQueue::publish_stage(std::uint32_t server, ResetSeed seed) {
    write_seed(slab_.server_locations[server], seed);
    commands_.write(slab_.server_locations[server], (num_envs_ + server) * slab_.plan.batch_size, Command::RESET, 0);
    commands_.issue_reserved(server);
}

// Issues resets that could not be issued before: those behind a running reset, and those of rebuilt env objects.
void SpareQueue::flush_deferred_resets(const std::function<bool(std::uint32_t env_id)>& is_idle) {
    has_deferred_ = false;
    for (std::uint32_t server = 0; server < records_.size(); ++server) {
        Record& record = records_[server];
        while (!record.deferred.empty() && commands_.is_published_done(server)) {
            const ResetSeed seed = record.deferred.front();
            record.deferred.pop_front();
            publish_stage(server, seed);
        }
        has_deferred_ |= !record.deferred.empty();
        if (!record.is_rebuilt || !record.deferred.empty()) continue;
        record.is_rebuilt = record.is_staged;
        if (!record.is_staged) continue;
        if ((record.env != NO_ENV && !is_idle(record.env)) || !commands_.is_done(server)) {
            has_deferred_ = true;
            continue;
        }
        stage(server);
        --record.num_begun;  // the same episode again
    }
}

void SpareQueue::stage_again(std::uint32_t server) {
    Record& record = records_[server];
    if (!record.is_staged || !record.deferred.empty()) return;
    stage(server);
    --record.num_begun;
}

// ---- positions ----------------------------------------------------------------------------------------------------

nb::dict SpareQueue::positions() const {
    nb::list records;
    for (const Record& record : records_) {
        records.append(nb::make_tuple(record.env, record.is_staged, record.is_drawn, record.has_own_seed, record.next.has_seed, record.next.seed, record.own_seed, record.num_begun));
    }
    nb::dict saved;
    saved["records"] = records;
    saved["queue"] = nb::list(nb::tuple(nb::cast(std::vector<std::uint32_t>(queue_.begin(), queue_.end()))));
    saved["pool_seed"] = nb::make_tuple(has_pool_seed_, pool_seed_, num_drawn_);
    return saved;
}

void SpareQueue::restore(const nb::dict& saved) {
    std::vector<Record> records;
    std::vector<std::uint32_t> owners;
    for (nb::handle each : nb::cast<nb::list>(saved["records"])) {
        const auto number = [&](int at) { return nb::cast<std::uint64_t>(each[at]); };
        Record record;
        record.env = nb::cast<std::uint32_t>(each[0]);
        record.is_staged = number(1) != 0, record.is_drawn = number(2) != 0, record.has_own_seed = number(3) != 0;
        record.next = {number(4) != 0, number(5)}, record.own_seed = number(6), record.num_begun = number(7);
        if (record.env != NO_ENV) owners.push_back(record.env);
        records.push_back(std::move(record));
    }
    const auto queue = nb::cast<std::vector<std::uint32_t>>(saved["queue"]);
    std::ranges::sort(owners);
    bool is_right = records.size() == records_.size() && queue.size() == num_spares_ && owners.size() == num_envs_;
    for (std::uint32_t env = 0; is_right && env < num_envs_; ++env) is_right = owners[env] == env;
    for (const std::uint32_t server : queue) is_right = is_right && server < records.size() && records[server].env == NO_ENV && std::ranges::count(queue, server) == 1;
    if (!is_right) throw std::invalid_argument("it has another number of envs or spares");
    const nb::handle seed = saved["pool_seed"];
    has_pool_seed_ = nb::cast<bool>(seed[0]), pool_seed_ = nb::cast<std::uint64_t>(seed[1]), num_drawn_ = nb::cast<std::uint64_t>(seed[2]);
    records_ = std::move(records);
    queue_.assign(queue.begin(), queue.end());
}

std::uint32_t SpareQueue::server_of(std::uint32_t env) const {
    return static_cast<std::uint32_t>(std::ranges::find(records_, env, &Record::env) - records_.begin());
}

// Called after the reset of all envs was sent, which restarts the sequence of seeds.
void SpareQueue::stage_all(nb::handle seeds) {
    std::size_t place = 0;
    for (const std::uint32_t server : queue_) {
        Record& record = records_[server];
        const nb::object seed = seeds[place++];
        if (!seed.is_none()) record.own_seed = nb::cast<std::uint64_t>(seed), record.has_own_seed = true;
        draw_seed(server);
        if (!seed.is_none() && !record.next.has_seed) record.next = {true, record.own_seed};
        stage(server);
    }
}

// ---- what was staged becomes a result ---------------------------------------------------------------------------

ResetSeed SpareQueue::use_staged(std::uint32_t server) {
    records_[server].is_drawn = false;
    if (!commands_.is_done(server)) add_to(slab_.pool->own.counters.num_spares_waited, 1);
    return records_[server].next;
}

void SpareQueue::copy_staged(std::uint32_t server, std::uint32_t row, std::uint32_t slot) {
    const SlabPlan& plan = slab_.plan;
    for (std::size_t index = 0; index < plan.observation.size(); ++index) {
        const Column& column = plan.observation[index];
        std::memcpy(slab_.base + column.at(slot, row), slab_.base + plan.staging[index].at(0, server * plan.batch_size), column.row_bytes * plan.batch_size);
    }
    const std::uint32_t staged = (num_envs_ + server) * plan.batch_size;
    for (std::uint32_t k = 0; k < plan.batch_size; ++k) {
        slab_.clear_outcome(row + k);
        slab_.clear_episode(row + k);
        std::memcpy(slab_.alive(row + k), slab_.alive(staged + k), plan.outcome.alive.row_bytes);
    }
    for (const Column& column : plan.info) {
        std::memcpy(slab_.base + column.at(0, row), slab_.base + column.at(0, staged), column.row_bytes * plan.batch_size);
    }
    const auto [words, local] = slab_.server_words(server);
    const bool is_inline = (words.result[local] & RESULT_REMOTE) == 0;
    if (is_inline) std::memcpy(slab_.payload(row), slab_.payload(staged), std::min<std::uint64_t>(words.payload_bytes[local], plan.payload.row_bytes));
    discard_staged(server);
}

}  // namespace stepmill
