#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "relay/relay_message.hpp"
#include "shared/reaper.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t SLICE_NS = 100'000'000;  // a wait looks again after at most this time
constexpr std::uint32_t SLOT_OF_NODE = 0;        // a node copies each result before the next command: one slot suffices

}  // namespace

NodeRelay::NodeRelay(std::shared_ptr<Slab> slab)
    : slab_(std::move(slab)), blobs_(*slab_), num_posted_(slab_->workers.size()), generations_(slab_->workers.size()), is_death_collected_(slab_->workers.size()) {
    slab_->check();
    for (std::uint32_t worker = 0; worker < slab_->workers.size(); ++worker) {
        first_server_.push_back(static_cast<std::uint32_t>(servers_.size()));
        const std::vector<std::uint32_t>& own = slab_->plan.servers[worker];
        for (std::uint32_t local = 0; local < own.size(); ++local) servers_.push_back({{worker, local}, own[local]});
    }
}

bool NodeRelay::is_done(const Server& server) const {
    const auto [words, local] = slab_->server_words(server.server);
    return words.done[local].load(std::memory_order_acquire) == server.ticket;
}

std::uint32_t NodeRelay::num_outstanding() const {
    return static_cast<std::uint32_t>(std::ranges::count_if(servers_, [](const Server& server) { return server.is_outstanding; }));
}

std::uint32_t NodeRelay::apply_commands(nb::handle message) {
    std::vector<std::uint64_t> storage;
    Cursor cursor = open_message(message, storage);
    const CommandHeader& header = read_header<CommandHeader>(cursor);
    const CommandColumns columns(cursor, slab_->plan, header);
    slab_->pool->own.eager.store(header.is_eager, std::memory_order_relaxed);
    slab_->pool->own.hashing.store(header.is_hashing, std::memory_order_relaxed);
    std::vector<std::uint8_t> has_commands(slab_->workers.size());
    std::uint32_t num_new = 0;
    std::size_t blob_at = 0;
    for (std::size_t row = 0; row < header.num; ++row) {
        if (columns.server[row] >= servers_.size() || blob_at + columns.blob_bytes[row] > header.blob_bytes) throw std::invalid_argument("a message of a pool names a server that does not exist");
        Server& server = servers_[columns.server[row]];
        const std::span blob(columns.blobs + blob_at, columns.blob_bytes[row]);
        blob_at += columns.blob_bytes[row];
        if (!is_later(columns.ticket[row], server.pool_ticket)) continue;  // it came before
        const auto [words, local] = slab_->server_words(server.server);
        const std::uint32_t first_row = server.server * slab_->plan.batch_size;
        words.flags[local] = columns.flags[row];
        words.seed[local] = columns.seed[row];
        words.episode[local] = columns.episode[row];
        if ((columns.flags[row] & FLAG_BLOB) != 0) {
            if (const int error = blobs_.write(server.server, blob); error != 0) throw std::system_error(error, std::generic_category(), "the options of a reset cannot be stored");
        }
        for (std::size_t leaf = 0; leaf < columns.actions.size(); ++leaf) {
            const Column& column = slab_->plan.action[leaf];
            const std::size_t size = column.row_bytes * slab_->plan.batch_size;
            std::memcpy(slab_->base + column.at(0, first_row), columns.actions[leaf] + row * size, size);
        }
        words.row[local] = first_row;
        set_command(words, local, static_cast<Command>(columns.command[row]));
        words.slot[local] = SLOT_OF_NODE;
        server.pool_ticket = columns.ticket[row];
        server.is_outstanding = true;
        words.ticket[local].store(++server.ticket, std::memory_order_release);
        has_commands[server.location.worker] = 1;
        ++num_new;
    }
    for (std::uint32_t worker = 0; worker < has_commands.size(); ++worker) {
        if (!has_commands[worker]) continue;
        ring_worker(*slab_->workers[worker]);
        abort_if_dead(*slab_, worker);
    }
    return num_new;
}

void NodeRelay::wake() {
    is_woken_.store(true, std::memory_order_seq_cst);
    ring_pool(*slab_->pool);
}

bool NodeRelay::wait(bool is_for_all, double timeout_s) {
    PoolControl& pool = *slab_->pool;
    const std::uint64_t deadline = now_ns() + to_ns(timeout_s);
    for (;;) {
        // This order sees every result or is woken by it, as in PoolState::wait_until_done.
        const std::uint32_t seen = pool.shared.bell.load(std::memory_order_acquire);
        const std::uint32_t count = pool.shared.count.load(std::memory_order_seq_cst);
        if (is_woken_.exchange(false, std::memory_order_seq_cst)) return false;
        for (std::uint32_t worker = 0; worker < slab_->workers.size(); ++worker) {
            if (slab_->workers[worker]->learner.dead.load(std::memory_order_seq_cst) != 0 && !is_death_collected_[worker]) return true;
        }
        std::uint32_t num_outstanding = 0, num_done = 0;
        for (const Server& server : servers_) {
            if (!server.is_outstanding) continue;
            ++num_outstanding;
            num_done += is_done(server);
        }
        const std::uint32_t num_needed = is_for_all ? num_outstanding : std::min(num_outstanding, 1u);
        if (num_outstanding != 0 && num_done >= num_needed) return true;
        const std::uint64_t now = now_ns();
        if (now >= deadline) return false;
        pool.own.ring_at.store(count + std::max(num_needed, num_done + 1) - num_done, std::memory_order_seq_cst);
        if (pool.shared.count.load(std::memory_order_seq_cst) != count) continue;
        {
            const nb::gil_scoped_release no_gil;
            park(pool.shared.bell, pool.own.parked, seen, std::min(SLICE_NS, deadline - now));
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

nb::object NodeRelay::collect_results() {
    std::vector<Server*> ready;
    std::vector<std::uint8_t> payloads, results;
    std::vector<std::uint64_t> sizes;
    std::vector<RelayedWorker> workers;
    ResultHeader header{MESSAGE_VERSION, 0, 0, static_cast<std::uint32_t>(slab_->workers.size()), 0};
    // Deaths first: the faults that they cause are then in this message or in a later one.
    for (std::uint32_t worker = 0; worker < slab_->workers.size(); ++worker) {
        const WorkerControl& control = *slab_->workers[worker];
        const std::uint32_t dead = control.learner.dead.load(std::memory_order_seq_cst);
        is_death_collected_[worker] = dead != 0;
        workers.push_back({read_counters(control.own.counters), control.own.num_ended.load(), control.own.resident_bytes.load(), generations_[worker], dead,
                           control.own.current.load(), control.own.running.load(), control.own.serving.load(), 0});
    }
    for (Server& server : servers_) {
        if (!server.is_outstanding || !is_done(server)) continue;
        server.is_outstanding = false;
        const auto [words, local] = slab_->server_words(server.server);
        std::uint8_t result = words.result[local];
        const bool has_payload = words.payload_bytes[local] != 0 && read_payload_bytes(*slab_, server.location, words.row[local], buffer_);
        if (!has_payload) buffer_.clear();
        if (words.fault[local].load(std::memory_order_relaxed) != 0) result &= static_cast<std::uint8_t>(~RESULT_FINAL);
        ready.push_back(&server);
        results.push_back(result);
        sizes.push_back(buffer_.size());
        payloads.insert(payloads.end(), buffer_.begin(), buffer_.end());
        header.num_final += (result & RESULT_FINAL) != 0;
    }
    header.num = static_cast<std::uint32_t>(ready.size());
    header.payload_bytes = payloads.size();
    const SlabPlan& plan = slab_->plan;
    const auto [message, columns] = new_message<ResultColumns>(header, plan);
    std::copy(workers.begin(), workers.end(), columns.workers);
    const std::vector<const Column*> outcomes = outcome_columns(plan);
    const std::size_t k = plan.batch_size;
    std::size_t final_row = 0;
    for (std::size_t i = 0; i < ready.size(); ++i) {
        const Server& server = *ready[i];
        const auto [words, local] = slab_->server_words(server.server);
        const std::size_t row = words.row[local];
        columns.server[i] = first_server_[server.location.worker] + local;
        columns.ticket[i] = server.pool_ticket;
        columns.fault[i] = words.fault[local].load(std::memory_order_relaxed);
        columns.payload_bytes[i] = sizes[i];
        columns.result[i] = results[i];
        columns.hash[i] = words.hash[local];
        auto copy = [&](const Column& column, std::byte* target, std::size_t index) {
            if (column.row_bytes != 0) std::memcpy(target + index * column.row_bytes * k, slab_->base + column.at(0, row), column.row_bytes * k);
        };
        for (std::size_t column = 0; column < outcomes.size(); ++column) copy(*outcomes[column], columns.outcomes[column], i);
        for (std::size_t leaf = 0; leaf < plan.observation.size(); ++leaf) copy(plan.observation[leaf], columns.observations[leaf], i);
        if ((results[i] & RESULT_FINAL) == 0) continue;
        for (std::size_t leaf = 0; leaf < plan.final_observation.size(); ++leaf) copy(plan.final_observation[leaf], columns.finals[leaf], final_row);
        ++final_row;
    }
    std::copy(payloads.begin(), payloads.end(), columns.payloads);
    return message;
}

nb::object NodeRelay::ticket_after(std::uint32_t worker, std::uint32_t local, std::uint32_t pool_ticket) const {
    const Server& server = servers_.at(first_server_.at(worker) + local);
    if (is_later(pool_ticket, server.pool_ticket)) return nb::none();
    return nb::int_(server.ticket - (server.pool_ticket - pool_ticket));
}

void NodeRelay::post_request(std::uint32_t worker) {
    WorkerControl& control = *slab_->workers.at(worker);
    control.learner.requests.store(++num_posted_[worker], std::memory_order_release);
    ring_worker(control);
}

void NodeRelay::set_tickets(std::uint32_t worker, const std::vector<std::uint32_t>& pool_tickets) {
    for (std::uint32_t local = 0; local < pool_tickets.size(); ++local) servers_.at(first_server_.at(worker) + local).pool_ticket = pool_tickets[local];
}

void NodeRelay::clear_worker(std::uint32_t worker) {
    const ServerWords& words = slab_->words.at(worker);
    reset_words(*slab_->workers[worker], num_posted_[worker], false);
    for (std::uint32_t local = 0; local < slab_->plan.servers[worker].size(); ++local) {
        Server& server = servers_[first_server_[worker] + local];
        server.is_outstanding = false;
        words.clear_result(local);
        words.ticket[local].store(server.ticket, std::memory_order_relaxed);
        words.state[local].store(state_word(server.ticket, Phase::IDLE), std::memory_order_relaxed);
        words.done[local].store(server.ticket, std::memory_order_release);
    }
}

void NodeRelay::begin_generation(std::uint32_t worker) {
    ++generations_.at(worker);
    is_death_collected_[worker] = 0;
    WorkerWords& own = slab_->workers[worker]->own;
    write_counters(own.counters, {});
    own.num_ended.store(0), own.resident_bytes.store(0);
}

void NodeRelay::stop() {
    for (WorkerControl* worker : slab_->workers) {
        worker->learner.stop.store(1, std::memory_order_release);
        ring_worker(*worker);
    }
    wake();
}

}  // namespace stepmill
