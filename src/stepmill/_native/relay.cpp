#define NO_IMPORT_ARRAY
#include "relay.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "blobs.hpp"
#include "columns.hpp"
#include "reaper.hpp"

namespace stepmill {

namespace {

constexpr std::uint32_t MESSAGE_VERSION = 1;
constexpr std::size_t ALIGN_BYTES = 8;
constexpr std::uint64_t SLICE_NS = 100'000'000;  // a wait looks again after at most this time
constexpr std::uint32_t NO_SLOT_OF_NODE = 0;     // a node copies each result before the next command: one slot suffices

// Places columns in a message one after another. Without a base it only computes the size.
struct Cursor {
    std::byte* base = nullptr;
    std::size_t limit = SIZE_MAX;
    std::size_t used = 0;

    template <typename Item>
    Item* take(std::size_t count) {
        used = (used + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        Item* items = base == nullptr ? nullptr : reinterpret_cast<Item*>(base + used);
        used += sizeof(Item) * count;
        if (used > limit) throw std::invalid_argument("a message between a pool and its node is incomplete, or of another version of stepmill");
        return items;
    }
};

struct CommandHeader {
    std::uint32_t version, num, is_eager, is_hashing;
    std::uint64_t blob_bytes;
};

struct ResultHeader {
    std::uint32_t version, num, num_final, num_workers;
    std::uint64_t payload_bytes;
};

struct CommandColumns {
    std::uint32_t *server, *ticket;
    std::uint64_t *seed, *episode, *blob_bytes;
    std::uint8_t *command, *flags;
    std::vector<std::byte*> actions;
    std::uint8_t* blobs;

    CommandColumns(Cursor& cursor, const SlabPlan& plan, std::size_t num, std::size_t num_blob_bytes)
        : server(cursor.take<std::uint32_t>(num)), ticket(cursor.take<std::uint32_t>(num)), seed(cursor.take<std::uint64_t>(num)),
          episode(cursor.take<std::uint64_t>(num)), blob_bytes(cursor.take<std::uint64_t>(num)), command(cursor.take<std::uint8_t>(num)),
          flags(cursor.take<std::uint8_t>(num)) {
        for (const Column& column : plan.action) actions.push_back(cursor.take<std::byte>(num * plan.batch_size * column.row_bytes));
        blobs = cursor.take<std::uint8_t>(num_blob_bytes);
    }
};

// The columns of a result that are copied as they are, except observations.
std::vector<const Column*> outcome_columns(const SlabPlan& plan) {
    std::vector<const Column*> columns{&plan.outcome.reward, &plan.outcome.terminated, &plan.outcome.truncated, &plan.outcome.alive,
                                       &plan.outcome.episode_return, &plan.over, &plan.episode_length};
    for (const Column& column : plan.info) columns.push_back(&column);
    return columns;
}

nb::object new_message(std::size_t size) { return new_column(static_cast<npy_intp>(size), NPY_UINT8); }

// Returns the bytes of a message; copies them to `storage` if they are not aligned.
Cursor open_message(nb::handle message, std::vector<std::uint64_t>& storage) {
    if (!PyArray_Check(message.ptr())) throw std::invalid_argument("a message is an array of bytes");
    auto* array = reinterpret_cast<PyArrayObject*>(message.ptr());
    if (PyArray_TYPE(array) != NPY_UINT8 || !PyArray_IS_C_CONTIGUOUS(array)) throw std::invalid_argument("a message is a contiguous array of bytes");
    Cursor cursor;
    cursor.base = static_cast<std::byte*>(PyArray_DATA(array));
    cursor.limit = static_cast<std::size_t>(PyArray_SIZE(array));
    if (reinterpret_cast<std::uintptr_t>(cursor.base) % ALIGN_BYTES != 0) {
        storage.resize(cursor.limit / sizeof(std::uint64_t) + 1);
        std::memcpy(storage.data(), cursor.base, cursor.limit);
        cursor.base = reinterpret_cast<std::byte*>(storage.data());
    }
    return cursor;
}

template <typename Header>
const Header& read_header(Cursor& cursor) {
    const Header& header = *cursor.take<Header>(1);
    if (header.version != MESSAGE_VERSION) throw std::invalid_argument("the node runs another version of stepmill; install the same version on all machines");
    return header;
}

bool read_payload(const Slab& slab, ServerLocation location, std::vector<std::uint8_t>& out) {
    const ServerWords& words = slab.words[location.worker];
    const OverflowRef ref{words.payload_offset[location.local], words.payload_bytes[location.local], words.payload_generation[location.local]};
    if ((words.result[location.local] & RESULT_REMOTE) != 0) return read_overflow(slab.result_fds.at(location.worker), ref, out);
    out.clear();
    if (ref.size > slab.plan.payload.row_bytes) return false;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(slab.payload(words.row[location.local]));
    out.assign(bytes, bytes + ref.size);
    return true;
}

}  // namespace

struct ResultColumns {
    RelayedWorker* workers;
    std::uint32_t *server, *ticket, *fault;
    std::uint64_t* payload_bytes;
    std::uint8_t* result;
    ObsHash* hash;
    std::vector<std::byte*> outcomes, observations, finals;
    std::uint8_t* payloads;

    ResultColumns(Cursor& cursor, const SlabPlan& plan, const ResultHeader& header)
        : workers(cursor.take<RelayedWorker>(header.num_workers)), server(cursor.take<std::uint32_t>(header.num)), ticket(cursor.take<std::uint32_t>(header.num)),
          fault(cursor.take<std::uint32_t>(header.num)), payload_bytes(cursor.take<std::uint64_t>(header.num)), result(cursor.take<std::uint8_t>(header.num)),
          hash(cursor.take<ObsHash>(header.num)) {
        const std::size_t k = plan.batch_size;
        for (const Column* column : outcome_columns(plan)) outcomes.push_back(cursor.take<std::byte>(header.num * k * column->row_bytes));
        for (const Column& column : plan.observation) observations.push_back(cursor.take<std::byte>(header.num * k * column.row_bytes));
        for (const Column& column : plan.final_observation) finals.push_back(cursor.take<std::byte>(header.num_final * k * column.row_bytes));
        payloads = cursor.take<std::uint8_t>(header.payload_bytes);
    }
};

// ---- the pool's side --------------------------------------------------------------------------------------------

PoolRelay::PoolRelay(std::shared_ptr<Slab> slab, std::vector<std::uint32_t> workers) : slab_(std::move(slab)) {
    slab_->check();
    for (const std::uint32_t worker : workers) {
        const auto index = static_cast<std::uint32_t>(workers_.size());
        workers_.push_back({worker, 0, {}, {}});
        payloads_.emplace_back(*slab_, worker);
        for (std::uint32_t local = 0; local < slab_->plan.servers.at(worker).size(); ++local) {
            servers_.push_back({{worker, local}, slab_->plan.servers[worker][local], slab_->words[worker].done[local].load(std::memory_order_acquire)});
            worker_of_.push_back(index);
        }
    }
}

bool PoolRelay::has_outstanding() const {
    return std::ranges::any_of(servers_, [&](const Server& server) {
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t ticket = words.ticket[server.location.local].load(std::memory_order_acquire);
        return ticket == server.collected && words.done[server.location.local].load(std::memory_order_acquire) != ticket;
    });
}

nb::object PoolRelay::collect_commands() {
    std::vector<std::size_t> places;
    std::vector<std::uint8_t> blobs;
    std::vector<std::uint64_t> sizes;
    for (std::size_t place = 0; place < servers_.size(); ++place) {
        Server& server = servers_[place];
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t local = server.location.local, ticket = words.ticket[local].load(std::memory_order_acquire);
        if (ticket == server.collected) continue;
        server.collected = ticket;
        if (words.done[local].load(std::memory_order_acquire) == ticket || !start_command(words.state[local], ticket)) continue;  // condemned
        places.push_back(place);
        sizes.push_back(0);
        if ((words.flags[local] & FLAG_BLOB) == 0) continue;
        if (!read_blob_bytes(*slab_, server.location.worker, local, buffer_)) throw std::runtime_error("the options of a reset could not be read");
        sizes.back() = buffer_.size();
        blobs.insert(blobs.end(), buffer_.begin(), buffer_.end());
    }
    if (places.empty()) return nb::none();
    const CommandHeader header{MESSAGE_VERSION, static_cast<std::uint32_t>(places.size()), slab_->pool->eager.load(std::memory_order_relaxed),
                               slab_->pool->hashing.load(std::memory_order_relaxed), blobs.size()};
    Cursor measure;
    measure.take<CommandHeader>(1);
    CommandColumns(measure, slab_->plan, places.size(), blobs.size());
    nb::object message = new_message(measure.used);
    Cursor cursor{data_of<std::byte>(message), measure.used};
    *cursor.take<CommandHeader>(1) = header;
    const CommandColumns columns(cursor, slab_->plan, places.size(), blobs.size());
    for (std::size_t i = 0; i < places.size(); ++i) {
        const Server& server = servers_[places[i]];
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t local = server.location.local;
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
    worker.newest = report;
    control.busy_ns.store(worker.before.busy_ns + report.busy_ns, std::memory_order_relaxed);
    control.wait_ns.store(worker.before.wait_ns + report.wait_ns, std::memory_order_relaxed);
    control.num_steps.store(worker.before.num_steps + report.num_steps, std::memory_order_relaxed);
    control.num_resets.store(worker.before.num_resets + report.num_resets, std::memory_order_relaxed);
    control.num_retries.store(worker.before.num_retries + report.num_retries, std::memory_order_relaxed);
    if (report.dead == static_cast<std::uint32_t>(Death::NONE)) return;
    // Before its faults are published: who handles a fault finds the death.
    control.running.store(report.running, std::memory_order_release);
    control.current.store(report.current, std::memory_order_release);
    control.serving.store(report.serving, std::memory_order_release);
    std::uint32_t none = static_cast<std::uint32_t>(Death::NONE);
    control.dead.compare_exchange_strong(none, report.dead, std::memory_order_seq_cst);
    dead.append(worker.worker);
}

void PoolRelay::publish_row(const ResultColumns& columns, std::size_t row, std::size_t final_row, const std::uint8_t* payload) {
    const Server& server = servers_[columns.server[row]];
    const ServerWords& words = slab_->words[server.location.worker];
    const SlabPlan& plan = slab_->plan;
    const std::uint32_t local = server.location.local, ticket = columns.ticket[row];
    if (words.ticket[local].load(std::memory_order_acquire) != ticket || !claim_result(words.state[local], ticket)) return;  // condemned meanwhile
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

void PoolRelay::expect_worker(std::uint32_t worker, std::uint32_t generation) {
    for (Worker& each : workers_) {
        if (each.worker != worker) continue;
        const WorkerControl& control = *slab_->workers[worker];
        each.before = {control.busy_ns.load(), control.wait_ns.load(), control.num_steps.load(), control.num_resets.load(), control.num_retries.load(), 0, 0, 0, 0, 0, 0};
        each.newest = {};
        each.generation = generation;
    }
}

// ---- the node's side --------------------------------------------------------------------------------------------

NodeRelay::NodeRelay(std::shared_ptr<Slab> slab)
    : slab_(std::move(slab)), num_posted_(slab_->workers.size()), generations_(slab_->workers.size()), is_death_collected_(slab_->workers.size()) {
    slab_->check();
    for (std::uint32_t worker = 0; worker < slab_->workers.size(); ++worker) {
        first_server_.push_back(static_cast<std::uint32_t>(servers_.size()));
        const std::vector<std::uint32_t>& own = slab_->plan.servers[worker];
        blobs_.emplace_back(slab_->command_fds.at(worker), own.size());
        for (std::uint32_t local = 0; local < own.size(); ++local) servers_.push_back({{worker, local}, own[local]});
    }
}

bool NodeRelay::is_done(const Server& server) const {
    return slab_->words[server.location.worker].done[server.location.local].load(std::memory_order_acquire) == server.ticket;
}

std::uint32_t NodeRelay::num_outstanding() const {
    return static_cast<std::uint32_t>(std::ranges::count_if(servers_, [](const Server& server) { return server.is_outstanding; }));
}

void NodeRelay::write_blob(const Server& server, const std::uint8_t* bytes, std::uint64_t size) {
    buffer_.assign(bytes, bytes + size);
    if (write_small_blob(*slab_, server.server, buffer_)) return;
    const ServerWords& words = slab_->words[server.location.worker];
    const std::uint32_t local = server.location.local;
    OverflowRef ref;
    if (const int error = blobs_[server.location.worker].write(local, buffer_.data(), buffer_.size(), ref); error != 0) throw std::system_error(error, std::generic_category(), "the options of a reset cannot be stored");
    words.blob_offset[local] = ref.offset;
    words.blob_bytes[local] = ref.size;
    words.blob_generation[local] = ref.generation;
}

std::uint32_t NodeRelay::apply_commands(nb::handle message) {
    std::vector<std::uint64_t> storage;
    Cursor cursor = open_message(message, storage);
    const CommandHeader& header = read_header<CommandHeader>(cursor);
    const CommandColumns columns(cursor, slab_->plan, header.num, header.blob_bytes);
    slab_->pool->eager.store(header.is_eager, std::memory_order_relaxed);
    slab_->pool->hashing.store(header.is_hashing, std::memory_order_relaxed);
    std::vector<std::uint8_t> has_commands(slab_->workers.size());
    std::uint32_t num_new = 0;
    std::size_t blob_at = 0;
    for (std::size_t row = 0; row < header.num; ++row) {
        if (columns.server[row] >= servers_.size() || blob_at + columns.blob_bytes[row] > header.blob_bytes) throw std::invalid_argument("a message of a pool names a server that does not exist");
        Server& server = servers_[columns.server[row]];
        const std::uint8_t* blob = columns.blobs + blob_at;
        blob_at += columns.blob_bytes[row];
        if (server.has_ticket && static_cast<std::int32_t>(columns.ticket[row] - server.pool_ticket) <= 0) continue;  // it came before
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t local = server.location.local, first_row = server.server * slab_->plan.batch_size;
        words.flags[local] = columns.flags[row];
        words.seed[local] = columns.seed[row];
        words.episode[local] = columns.episode[row];
        if ((columns.flags[row] & FLAG_BLOB) != 0) write_blob(server, blob, columns.blob_bytes[row]);
        for (std::size_t leaf = 0; leaf < columns.actions.size(); ++leaf) {
            const Column& column = slab_->plan.action[leaf];
            const std::size_t size = column.row_bytes * slab_->plan.batch_size;
            std::memcpy(slab_->base + column.at(0, first_row), columns.actions[leaf] + row * size, size);
        }
        words.row[local] = first_row;
        set_command(words, local, static_cast<Command>(columns.command[row]));
        words.slot[local] = NO_SLOT_OF_NODE;
        server.pool_ticket = columns.ticket[row];
        server.has_ticket = server.is_outstanding = true;
        words.ticket[local].store(++server.ticket, std::memory_order_release);
        has_commands[server.location.worker] = 1;
        ++num_new;
    }
    for (std::uint32_t worker = 0; worker < has_commands.size(); ++worker) {
        if (!has_commands[worker]) continue;
        ring_worker(*slab_->workers[worker]);
        // As CommandWriter::check_deaths_of: either the reaper sees these tickets, or this thread sees `dead`.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (slab_->workers[worker]->dead.load(std::memory_order_seq_cst) != 0) condemn_worker(*slab_, worker, Fault::DIED);
    }
    return num_new;
}

void NodeRelay::wake() {
    is_woken_.store(true, std::memory_order_seq_cst);
    ring_pool(*slab_->pool);
}

bool NodeRelay::wait(bool is_for_all, double timeout_s) {
    PoolControl& pool = *slab_->pool;
    const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
    for (;;) {
        // This order sees every result or is woken by it, as in PoolState::wait_ids.
        const std::uint32_t seen = pool.bell.load(std::memory_order_acquire);
        const std::uint32_t count = pool.count.load(std::memory_order_seq_cst);
        if (is_woken_.exchange(false, std::memory_order_seq_cst)) return false;
        for (std::uint32_t worker = 0; worker < slab_->workers.size(); ++worker) {
            if (slab_->workers[worker]->dead.load(std::memory_order_seq_cst) != 0 && !is_death_collected_[worker]) return true;
        }
        std::uint32_t num_outstanding = 0, num_done = 0;
        for (const Server& server : servers_) {
            if (!server.is_outstanding) continue;
            ++num_outstanding;
            num_done += is_done(server);
        }
        const std::uint32_t need = is_for_all ? num_outstanding : std::min(num_outstanding, 1u);
        if (num_outstanding != 0 && num_done >= need) return true;
        const std::uint64_t now = now_ns();
        if (now >= deadline) return false;
        pool.want.store(count + std::max(need, num_done + 1) - num_done, std::memory_order_seq_cst);
        if (pool.count.load(std::memory_order_seq_cst) != count) continue;
        {
            const nb::gil_scoped_release no_gil;
            park(pool.bell, pool.parked, seen, std::min(SLICE_NS, deadline - now));
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
        const std::uint32_t dead = control.dead.load(std::memory_order_seq_cst);
        is_death_collected_[worker] = dead != 0;
        workers.push_back({control.busy_ns.load(), control.wait_ns.load(), control.num_steps.load(), control.num_resets.load(), control.num_retries.load(),
                           generations_[worker], dead, control.current.load(), control.running.load(), control.serving.load(), 0});
    }
    for (Server& server : servers_) {
        if (!server.is_outstanding || !is_done(server)) continue;
        server.is_outstanding = false;
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t local = server.location.local;
        std::uint8_t result = words.result[local];
        const bool has_payload = words.payload_bytes[local] != 0 && read_payload(*slab_, server.location, buffer_);
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
    Cursor measure;
    measure.take<ResultHeader>(1);
    const SlabPlan& plan = slab_->plan;
    ResultColumns(measure, plan, header);
    nb::object message = new_message(measure.used);
    Cursor cursor{data_of<std::byte>(message), measure.used};
    *cursor.take<ResultHeader>(1) = header;
    const ResultColumns columns(cursor, plan, header);
    std::copy(workers.begin(), workers.end(), columns.workers);
    const std::vector<const Column*> outcomes = outcome_columns(plan);
    const std::size_t k = plan.batch_size;
    std::size_t final_row = 0;
    for (std::size_t i = 0; i < ready.size(); ++i) {
        const Server& server = *ready[i];
        const ServerWords& words = slab_->words[server.location.worker];
        const std::uint32_t local = server.location.local;
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
    if (!server.has_ticket) return pool_ticket == 0 ? nb::object(nb::int_(0)) : nb::none();
    const auto behind = static_cast<std::int32_t>(server.pool_ticket - pool_ticket);
    if (behind < 0) return nb::none();
    return nb::int_(server.ticket - static_cast<std::uint32_t>(behind));
}

void NodeRelay::post_request(std::uint32_t worker) {
    WorkerControl& control = *slab_->workers.at(worker);
    control.requests.store(++num_posted_[worker], std::memory_order_release);
    ring_worker(control);
}

void NodeRelay::clear_worker(std::uint32_t worker) {
    WorkerControl& control = *slab_->workers.at(worker);
    const ServerWords& words = slab_->words[worker];
    control.requests.store(num_posted_[worker], std::memory_order_relaxed);
    control.stop.store(0, std::memory_order_relaxed);
    control.parked.store(0, std::memory_order_relaxed);
    control.serving.store(0, std::memory_order_relaxed);
    control.current.store(NO_SERVER, std::memory_order_relaxed);
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
    for (std::atomic<std::uint64_t>* counter : {&slab_->workers[worker]->busy_ns, &slab_->workers[worker]->wait_ns, &slab_->workers[worker]->num_steps,
                                                &slab_->workers[worker]->num_resets, &slab_->workers[worker]->num_retries}) counter->store(0);
}

void NodeRelay::stop() {
    for (WorkerControl* worker : slab_->workers) {
        worker->stop.store(1, std::memory_order_release);
        ring_worker(*worker);
    }
    wake();
}

}  // namespace stepmill
