// Spares: more env objects than envs. Whose episode is over goes to the back of the queue and is reset there; the one in
// front, which is freshly reset or about to be, takes its place.
//
//     env 3 is served by server 3, ends ─► queue [8, 9] becomes [9, 3]; server 8 serves env 3, server 3 is reset
//
// A reset in the queue is a command like any other, but for its row: the result goes to the staging row of the server, and
// is copied where it belongs when a command of the env asks for it (`take`), before it is received (`move_in`). The queue
// moves when results are received, in the order in which they are: what happens is a function of what the user does and of
// what the envs return, never of who was faster.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <ranges>

#include "ledger.hpp"
#include "seeds.hpp"

namespace stepmill {

// ---- who serves whom --------------------------------------------------------------------------------------------

bool Ledger::is_over(std::uint32_t id) const {
    if (num_spares_ == 0 || envs_[id].status == EnvStatus::EXHAUSTED || autoreset_ == Autoreset::SAME_STEP || (is_batched_ && autoreset_ == Autoreset::DISABLED)) return false;
    return have_all_ended(id);  // a batched env leaves as a whole
}

// What it has staged is of an object that died with its worker. Of what a successor finds, note_rebuilt() has told.
bool Ledger::is_gone(std::uint32_t server) {
    const Seat seat = slab_->seats[server];
    const bool is_dead = is_restarting_[seat.worker] || slab_->workers[seat.worker]->dead.load(std::memory_order_acquire) != 0;
    return is_dead && servers_[server].behind.empty() && slab_->words[seat.worker].done[seat.local].load(std::memory_order_acquire) == ticket_word(server);
}

// The episode of this env is over, and received.
void Ledger::relieve(std::uint32_t id) {
    tend();
    const std::uint32_t finished = envs_[id].server;
    detach(id);
    queue_.push_back(finished);
    draw_seed(finished);
    stage(finished);
    const std::uint32_t next = queue_.front();
    queue_.pop_front();
    attach(id, next);
    const bool was_staged = servers_[next].is_staged;
    if (!was_staged) draw_seed(next);
    if (!was_staged || is_gone(next)) {
        stage(next);
        servers_[next].num_begun -= was_staged;  // it is the same once more
    }
}

void Ledger::detach(std::uint32_t id) {
    ServerBook& server = servers_[envs_[id].server];
    server.ticket = envs_[id].ticket;
    server.env = NO_ENV;
}

void Ledger::attach(std::uint32_t id, std::uint32_t server) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats.at(server);
    env.server = server;
    env.ticket = servers_[server].ticket;
    env.done = &slab_->words[seat.worker].done[seat.local];
    env.fault = &slab_->words[seat.worker].fault[seat.local];
    env.hash = &slab_->words[seat.worker].hash[seat.local];
    env.is_lost = env.needs_restore = false;  // these were of the one before
    env.lost_info.reset();
    servers_[server].env = id;
}

void Ledger::restore_order() {
    const InUse in_use(*this);
    for (const std::uint32_t id : all_) detach(id);
    for (const std::uint32_t id : all_) {
        const bool is_kept = envs_[id].server == id;
        const bool needs_restore = envs_[id].needs_restore;
        attach(id, id);
        if (is_kept) envs_[id].needs_restore = needs_restore;
        else if (envs_[id].status == EnvStatus::IDLE) envs_[id].status = EnvStatus::NEW;  // should its reset not be sent: this is another episode
    }
    queue_.clear();
    for (std::uint32_t server = num_envs_; server < servers_.size(); ++server) queue_.push_back(server);
    scanned_ = 0;
}

Ledger::Ids Ledger::served_by(std::uint32_t worker) const {
    Ids ids;
    for (const std::uint32_t server : slab_->plan.servers.at(worker)) {
        if (servers_[server].env != NO_ENV) ids.push_back(servers_[server].env);
    }
    std::ranges::sort(ids);
    return ids;
}

nb::list Ledger::envs_of(std::uint32_t worker) const {
    if (!slab_) raise(errors().closed, "the pool is closed; make a new one");
    nb::list ids;
    for (const std::uint32_t id : served_by(worker)) ids.append(id);
    return ids;
}

// ---- resets ahead of their time ---------------------------------------------------------------------------------

void Ledger::draw_seed(std::uint32_t server) {
    ServerBook& book = servers_[server];
    book.is_drawn = true;
    book.has_seed = false;
    if (seeding_ == Seeding::PER_EPISODE && has_pool_seed_) {
        book.has_seed = true;
        book.seed = derive_seed(pool_seed_, num_envs_, num_drawn_++);
    } else if (seeding_ == Seeding::FIXED && book.has_own_seed) {
        book.has_seed = true;
        book.seed = book.own_seed;
    }
}

// An episode in place of the one that was staged, or that an env was lost with.
void Ledger::begin_drawn(std::uint32_t server, ServerWords& words, std::uint32_t local) {
    ServerBook& book = servers_[server];
    if (!book.is_drawn) draw_seed(server);
    book.is_drawn = false;
    words.flags[local] = static_cast<std::uint8_t>(FLAG_AUTO | (book.has_seed ? FLAG_SEED : 0));
    words.seed[local] = book.seed;
}

// The worker's env objects are gone, and no successor is there yet. What they have staged nobody is to get.
void Ledger::note_rebuilt(std::uint32_t worker) {
    for (std::uint32_t local = 0; local < slab_->plan.servers[worker].size(); ++local) {
        const std::uint32_t server = slab_->plan.servers[worker][local];
        const bool is_settled = slab_->words[worker].done[local].load(std::memory_order_acquire) == ticket_word(server);
        servers_[server].is_rebuilt = servers_[server].is_staged && is_settled;
        is_untended_ |= servers_[server].is_rebuilt;
    }
}

// Resets a server with the seed that it has drawn; behind the reset that still runs there, if one does.
void Ledger::stage(std::uint32_t server) {
    ServerBook& book = servers_[server];
    const Seat seat = slab_->seats[server];
    std::uint32_t& ticket = ticket_word(server);
    book.is_staged = true;
    book.is_rebuilt = false;
    ++book.num_begun;
    if (inline_ != nullptr) inline_->run_server(seat.local);
    const bool is_idle = book.behind.empty() && slab_->words[seat.worker].done[seat.local].load(std::memory_order_acquire) == ticket;
    ++ticket;
    if (is_idle) {
        publish_stage(server, book.has_seed, book.seed);
        return;
    }
    // Not one in place of another: how often an env was reset may show in what it does next.
    book.behind.emplace_back(book.has_seed, book.seed);
    is_untended_ = true;
}

void Ledger::publish_stage(std::uint32_t server, bool has_seed, std::uint64_t seed) {
    const Seat seat = slab_->seats[server];
    ServerWords& words = slab_->words[seat.worker];
    words.flags[seat.local] = static_cast<std::uint8_t>(FLAG_AUTO | (has_seed ? FLAG_SEED : 0));
    words.seed[seat.local] = seed;
    words.row[seat.local] = staging_row(server);
    words.slot[seat.local] = 0;
    set_command(words, seat.local, Command::RESET);
    publish_ticket(seat, published_ticket(server));
    if (inline_ != nullptr) return;
    ring_worker(*slab_->workers[seat.worker]);
    check_deaths_of(seat.worker);
}

// What could not be done at once: resets behind others that still ran, and those of objects that were built anew.
void Ledger::tend() {
    if (!is_untended_) return;
    is_untended_ = false;
    for (std::uint32_t server = 0; server < servers_.size(); ++server) {
        ServerBook& book = servers_[server];
        const Seat seat = slab_->seats[server];
        const Word& done = slab_->words[seat.worker].done[seat.local];
        while (!book.behind.empty() && done.load(std::memory_order_acquire) == published_ticket(server)) {
            const auto [has_seed, seed] = book.behind.front();
            book.behind.erase(book.behind.begin());
            publish_stage(server, has_seed, seed);
        }
        is_untended_ |= !book.behind.empty();
        if (!book.is_rebuilt || !book.behind.empty()) continue;
        book.is_rebuilt = book.is_staged;
        if (!book.is_staged) continue;
        const bool is_idle = book.env == NO_ENV || envs_[book.env].status == EnvStatus::IDLE || envs_[book.env].status == EnvStatus::NEW;
        if (!is_idle || done.load(std::memory_order_acquire) != ticket_word(server)) {
            is_untended_ = true;
            continue;
        }
        stage(server);
        --book.num_begun;  // it is the same once more
    }
}

// ---- what was staged becomes a result ---------------------------------------------------------------------------

bool Ledger::takes_staged(std::uint32_t id, Command command) const {
    const EnvBook& env = envs_[id];
    return command == Command::STEP ? servers_[env.server].is_staged : env.is_taking;
}

// The env's command asks for what its server has staged. There is nothing to write: it is there, or on its way.
void Ledger::take(std::uint32_t id) {
    EnvBook& env = envs_[id];
    ServerBook& server = servers_[env.server];
    env.is_taking = env.is_reset = true;
    env.is_lost = env.needs_restore = false;
    env.has_seed = server.has_seed;
    env.base_seed = server.seed;
    env.episode = 0;
    env.log.next_blob.reset();
    server.is_drawn = false;
    ++num_taken_;
    num_late_ += !is_done(id);
}

// Received: the observation goes to where that of a reset would be.
void Ledger::move_in(std::uint32_t id) {
    EnvBook& env = envs_[id];
    for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
        const Leaf& leaf = obs_.leaves[index];
        const std::byte* source = slab_->base + slab_->plan.staging[index].at(0, env.server * batch_size_);
        std::memcpy(slab_->base + leaf.column.at(env.target, row_of(id)), source, leaf.row_bytes * batch_size_);
    }
    const std::uint32_t staged = staging_row(env.server);
    const std::size_t alive_bytes = slab_->plan.outcome.alive.row_bytes;
    for (std::uint32_t k = 0; k < batch_size_; ++k) {
        slab_->clear_outcome(row_of(id) + k);
        slab_->clear_episode(row_of(id) + k);
        std::memcpy(slab_->alive(row_of(id) + k), slab_->alive(staged + k), alive_bytes);
    }
    for (const Column& column : slab_->plan.info) {
        std::memcpy(slab_->base + column.at(0, row_of(id)), slab_->base + column.at(0, staged), column.row_bytes * batch_size_);
    }
    drop_staged(id);
}

void Ledger::drop_staged(std::uint32_t id) {
    envs_[id].is_taking = false;
    servers_[envs_[id].server].is_staged = false;
}

void Ledger::claim_staged(nb::handle env_ids) {
    const InUse in_use(*this);
    tend();
    Ids storage, ids;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        ServerBook& server = servers_[envs_[id].server];
        if (!server.is_staged || envs_[id].status == EnvStatus::PENDING || envs_[id].is_kept) continue;
        envs_[id].is_taking = true;
        ids.push_back(id);
    }
    dispatch(ids, Command::RESET);
}

// After the reset of all envs was sent: with it begins a new count of seeds.
void Ledger::stage_spares(nb::handle seeds) {
    const InUse in_use(*this);
    std::size_t place = 0;
    for (const std::uint32_t server : queue_) {
        ServerBook& book = servers_[server];
        const nb::object seed = seeds[place++];
        if (!seed.is_none()) book.own_seed = nb::cast<std::uint64_t>(seed), book.has_own_seed = true;
        draw_seed(server);
        if (!seed.is_none() && !book.has_seed) book.seed = book.own_seed, book.has_seed = true;
        stage(server);
    }
}

// What an object has staged is lost with it: its successor begins the same episode, before an env takes it.
void Ledger::stage_once_more(std::uint32_t server) {
    ServerBook& book = servers_[server];
    const bool is_taken = book.env != NO_ENV && envs_[book.env].status == EnvStatus::PENDING;
    if (!book.is_staged || is_taken || !book.behind.empty()) return;
    stage(server);
    --book.num_begun;
}

// An explicit reset of the env: with the seed in its words, or with one that is drawn.
void Ledger::note_own_seed(std::uint32_t id, bool is_whole) {
    ServerBook& book = servers_[envs_[id].server];
    const Seat seat = slab_->seats[envs_[id].server];
    ServerWords& words = slab_->words[seat.worker];
    const bool is_given = (words.flags[seat.local] & FLAG_SEED) != 0;
    if (is_given) {
        book.own_seed = words.seed[seat.local];
        book.has_own_seed = true;
        if ((is_whole && id == 0) || !has_pool_seed_) pool_seed_ = book.own_seed, has_pool_seed_ = true, num_drawn_ = 0;
    } else if (seeding_ != Seeding::CONTINUE && !envs_[id].log.has_next_seed()) {
        draw_seed(envs_[id].server);
        if (!book.has_seed) return;
        words.seed[seat.local] = book.seed;
        words.flags[seat.local] |= FLAG_SEED;
    }
    book.is_drawn = false;
}

}  // namespace stepmill
