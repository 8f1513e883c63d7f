#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "codec/blobs.hpp"
#include "relay/relay_message.hpp"

namespace stepmill {

PoolRelay::PoolRelay(std::shared_ptr<Slab> slab, std::vector<std::uint32_t> workers) : slab_(std::move(slab)) {
    slab_->check();
    for (const std::uint32_t worker : workers) {
        const auto index = static_cast<std::uint32_t>(workers_.size());
        workers_.push_back({worker, 0, {}});
        payloads_.emplace_back(*slab_, worker);
        for (std::uint32_t local = 0; local < slab_->plan.servers.at(worker).size(); ++local) {
            servers_.push_back({slab_->plan.servers[worker][local], slab_->words[worker].done[local].load(std::memory_order_acquire)});
            worker_of_.push_back(index);
        }
    }
}

bool PoolRelay::has_outstanding() const {
    return std::ranges::any_of(servers_, [&](const Server& server) {
        const auto [words, local] = slab_->server_words(server.server);
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
        return ticket == server.collected && words.done[local].load(std::memory_order_acquire) != ticket;
    });
}

nb::object PoolRelay::collect_commands() {
    std::vector<std::size_t> places;
    std::vector<std::uint8_t> blobs;
    std::vector<std::uint64_t> sizes;
    for (std::size_t place = 0; place < servers_.size(); ++place) {
        Server& server = servers_[place];
        const auto [words, local] = slab_->server_words(server.server);
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
        if (ticket == server.collected) continue;
        server.collected = ticket;
        if (words.done[local].load(std::memory_order_acquire) == ticket || !start_command(words.state[local], ticket)) continue;  // aborted
        places.push_back(place);
        sizes.push_back(0);
        if ((words.flags[local] & FLAG_BLOB) == 0) continue;
        if (!read_blob_bytes(*slab_, server.server, buffer_)) throw std::runtime_error("the options of a reset could not be read");
        sizes.back() = buffer_.size();
        blobs.insert(blobs.end(), buffer_.begin(), buffer_.end());
    }
    if (places.empty()) return nb::none();
    const CommandHeader header{MESSAGE_VERSION, static_cast<std::uint32_t>(places.size()), slab_->pool->own.eager.load(std::memory_order_relaxed),
                               slab_->pool->own.hashing.load(std::memory_order_relaxed), blobs.size()};
    const auto [message, columns] = new_message<CommandColumns>(header, slab_->plan);
    for (std::size_t i = 0; i < places.size(); ++i) {
        const Server& server = servers_[places[i]];
        const auto [words, local] = slab_->server_words(server.server);
        columns.server[i] = static_cast<std::uint32_t>(places[i]);
        columns.ticket[i] = server.collected;
        columns.seed[i] = words.seed[local];
        columns.episode[i] = words.episode[local];
        columns.blob_bytes[i] = sizes[i];
        columns.command[i] = static_cast<std::uint8_t>(get_command(words, local));
        columns.flags[i] = words.flags[local];
        for (std::size_t leaf = 0; leaf < columns.actions.size(); ++leaf) {
            const Column& column = slab_->plan.action[leaf];
            const std::size_t size = column.row_bytes * slab_->plan.batch_size;
            if (words.row[local] < slab_->plan.num_rows) std::memcpy(columns.actions[leaf] + i * size, slab_->base + column.at(0, words.row[local]), size);
        }
    }
    std::copy(blobs.begin(), blobs.end(), columns.blobs);
    return message;
}

nb::tuple PoolRelay::publish_results(nb::handle message) {
    std::vector<std::uint64_t> storage;
    Cursor cursor = open_message(message, storage);
    const ResultHeader& header = read_header<ResultHeader>(cursor);
    const ResultColumns columns(cursor, slab_->plan, header);
    nb::list dead;
    for (std::size_t index = 0; index < std::min<std::size_t>(header.num_workers, workers_.size()); ++index) update_worker(workers_[index], columns.workers[index], dead);
    std::size_t final_row = 0, payload_at = 0;
    for (std::size_t row = 0; row < header.num; ++row) {
        if (columns.server[row] >= servers_.size() || payload_at + columns.payload_bytes[row] > header.payload_bytes) throw std::invalid_argument("a message of a node names a server that does not exist");
        const bool has_final = (columns.result[row] & RESULT_FINAL) != 0;
        if (has_final && final_row >= header.num_final) throw std::invalid_argument("a message of a node lacks a final observation");
        publish_row(columns, row, final_row, columns.payloads + payload_at);
        final_row += has_final;
        payload_at += columns.payload_bytes[row];
    }
    if (header.num != 0) count_results(*slab_->pool, header.num);
    if (nb::len(dead) != 0) ring_pool(*slab_->pool);
    return nb::make_tuple(dead, header.num);
}

void PoolRelay::update_worker(Worker& worker, const RelayedWorker& report, nb::list& dead) {
    if (report.generation != worker.generation) return;  // sent before its successor served
    WorkerControl& control = *slab_->workers[worker.worker];
    CounterValues sums = worker.before;
    for (std::size_t index = 0; index < sums.size(); ++index) sums[index] += report.counters[index];
    write_counters(control.own.counters, sums);
    control.own.num_ended.store(report.num_ended, std::memory_order_relaxed);
    control.own.resident_bytes.store(report.resident_bytes, std::memory_order_relaxed);
    if (report.dead == static_cast<std::uint32_t>(Death::NONE)) return;
    // Before its faults are published: who handles a fault finds the death.
    control.own.running.store(report.running, std::memory_order_release);
    control.own.current.store(report.current, std::memory_order_release);
    control.own.serving.store(report.serving, std::memory_order_release);
    std::uint32_t none = static_cast<std::uint32_t>(Death::NONE);
    control.learner.dead.compare_exchange_strong(none, report.dead, std::memory_order_seq_cst);
    dead.append(worker.worker);
}

void PoolRelay::publish_row(const ResultColumns& columns, std::size_t row, std::size_t final_row, const std::uint8_t* payload) {
    const Server& server = servers_[columns.server[row]];
    const auto [words, local] = slab_->server_words(server.server);
    const SlabPlan& plan = slab_->plan;
    const std::uint32_t ticket = columns.ticket[row];
    if (words.ticket[local].load(std::memory_order_acquire) != ticket || !claim_result(words.state[local], ticket)) return;  // aborted meanwhile
    const std::size_t k = plan.batch_size, target = words.row[local];
    words.clear_result(local);
    auto fault = static_cast<Fault>(columns.fault[row]);
    if (fault == Fault::NONE) {
        const std::vector<const Column*> outcomes = outcome_columns(plan);
        auto copy = [&](const Column& column, std::size_t slot, std::size_t at, const std::byte* source, std::size_t index) {
            if (column.row_bytes != 0) std::memcpy(slab_->base + column.at(slot, at), source + index * column.row_bytes * k, column.row_bytes * k);
        };
        for (std::size_t i = 0; i < outcomes.size(); ++i) copy(*outcomes[i], 0, target, columns.outcomes[i], row);
        const bool is_staged = target >= plan.num_rows;
        for (std::size_t leaf = 0; leaf < plan.observation.size(); ++leaf) {
            if (is_staged) copy(plan.staging[leaf], 0, target - plan.num_rows, columns.observations[leaf], row);
            else copy(plan.observation[leaf], words.slot[local], target, columns.observations[leaf], row);
        }
        const bool has_final = (columns.result[row] & RESULT_FINAL) != 0;
        for (std::size_t leaf = 0; has_final && leaf < plan.final_observation.size(); ++leaf) copy(plan.final_observation[leaf], 0, target, columns.finals[leaf], final_row);
        words.result[local] = columns.result[row] & static_cast<std::uint8_t>(~RESULT_REMOTE);
        put(words.hash[local], columns.hash[row]);
    }
    if (columns.payload_bytes[row] != 0) {
        buffer_.assign(payload, payload + columns.payload_bytes[row]);
        if (!payloads_[worker_of_[columns.server[row]]].write(local, buffer_)) {
            PyErr_Clear();  // no memory is left: a fault without a text
            words.clear_result(local);
            fault = Fault::BAD_OUTPUT;
        }
    }
    words.fault[local].store(static_cast<std::uint32_t>(fault), std::memory_order_relaxed);
    words.done[local].store(ticket, std::memory_order_release);
}

std::vector<std::uint32_t> PoolRelay::tickets_of(std::uint32_t worker) const {
    std::vector<std::uint32_t> tickets;
    for (std::uint32_t local = 0; local < slab_->plan.servers.at(worker).size(); ++local) tickets.push_back(slab_->words[worker].ticket[local].load(std::memory_order_acquire));
    return tickets;
}

bool PoolRelay::is_published(std::uint32_t worker, std::uint32_t local, std::uint32_t ticket) const {
    if (worker >= slab_->workers.size() || local >= slab_->plan.servers[worker].size()) throw std::out_of_range("a request names a server that does not exist");
    return !is_later(ticket, slab_->words[worker].done[local].load(std::memory_order_acquire));
}

void PoolRelay::mark_serving(std::uint32_t worker) {
    slab_->workers.at(worker)->own.current.store(NO_SERVER, std::memory_order_release);
    slab_->workers.at(worker)->own.serving.store(1, std::memory_order_release);
}

void PoolRelay::expect_worker(std::uint32_t worker, std::uint32_t generation) {
    for (Worker& each : workers_) {
        if (each.worker != worker) continue;
        each.before = read_counters(slab_->workers[worker]->own.counters);
        each.generation = generation;
    }
}

}  // namespace stepmill
