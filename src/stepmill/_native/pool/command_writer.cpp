#define NO_IMPORT_ARRAY
#include "pool/command_writer.hpp"

#include <algorithm>

#include <fcntl.h>
#include <unistd.h>

#include "shared/py_ref.hpp"
#include "shared/reaper.hpp"

namespace stepmill {

CommandWriter::CommandWriter(Slab& slab, PyObject* pickler)
    : slab_(slab), tickets_(slab.server_locations.size()), is_restarting_(slab.workers.size()), has_new_commands_(slab.workers.size()), num_posted_(slab.workers.size()), blobs_(slab), encoder_(pickler) {}

void CommandWriter::attach_loop(nb::object loop) {
    loop_ = nb::cast<Loop*>(loop);
    loop_object_ = std::move(loop);
}

void CommandWriter::attach_advance(nb::object advance) { advance_ = std::move(advance); }

void CommandWriter::attach_outbox(int eventfd) {
    const int fd = fcntl(eventfd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "the descriptor of an outbox cannot be duplicated");
    outbox_.emplace(fd);
}

void CommandWriter::clear() {
    loop_ = nullptr;
    loop_object_.reset(), advance_.reset();
}

int CommandWriter::traverse(visitproc visit, void* arg) const {
    Py_VISIT(loop_object_.ptr());
    Py_VISIT(advance_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

const std::vector<std::uint8_t>& CommandWriter::encode(PyObject* blob) {
    buffer_.clear();
    if (!encoder_.encode(blob, buffer_)) throw nb::python_error();
    return buffer_;
}

void CommandWriter::write_blob(std::uint32_t server, std::span<const std::uint8_t> blob) {
    if (const int error = blobs_.write(server, blob); error != 0 && !set_size_error(error, blob.size())) throw nb::python_error();
    const auto [words, local] = slab_.server_words(server);
    words.flags[local] |= FLAG_BLOB;
}

void CommandWriter::repeat_blob(std::uint32_t server, std::span<const std::uint8_t> blob) {
    const auto [words, local] = slab_.server_words(server);
    words.flags[local] |= FLAG_BLOB;
    words.blob_offset[local] = BLOB_IN_ROW, words.blob_bytes[local] = UINT64_MAX;
    try {
        write_blob(server, blob);
    } catch (nb::python_error&) {
    }
}

// Tells the thread that sends commands to other machines that there are new ones.
void CommandWriter::notify_outbox() const {
    if (outbox_) set_event(outbox_->number());
}

void CommandWriter::deliver() {
    if (advance_) advance_(false);
    notify_outbox();
    if (has_workers()) {
        for (std::uint32_t w = 0; w < has_new_commands_.size(); ++w) {
            if (has_new_commands_[w]) ring_worker(*slab_.workers[w]);
        }
        for (std::uint32_t w = 0; w < has_new_commands_.size(); ++w) {
            if (has_new_commands_[w]) check_deaths_of(w);
        }
    }
    std::ranges::fill(has_new_commands_, std::uint8_t{0});
}

void CommandWriter::ring(std::uint32_t worker) {
    if (!has_workers()) return;
    notify_outbox();
    ring_worker(*slab_.workers[worker]);
    check_deaths_of(worker);
}

void CommandWriter::issue(std::uint32_t server) {
    publish(slab_.server_locations[server], ++tickets_[server].newest);
    ring(slab_.server_locations[server].worker);
}

void CommandWriter::reserve_ticket(std::uint32_t server) { ++tickets_[server].newest, ++tickets_[server].num_reserved; }

void CommandWriter::issue_reserved(std::uint32_t server) {
    --tickets_[server].num_reserved;
    publish(slab_.server_locations[server], published(server));
    ring(slab_.server_locations[server].worker);
}

void CommandWriter::check_deaths_of(std::uint32_t worker) {
    if (!is_restarting_[worker]) abort_if_dead(slab_, worker);
}

void CommandWriter::post_request(std::uint32_t worker) {
    WorkerControl& control = *slab_.workers.at(worker);
    control.learner.requests.store(++num_posted_[worker], std::memory_order_release);
    ring_worker(control);
}

// ---- restarts of workers -----------------------------------------------------------------------------------------

void CommandWriter::begin_restart(std::uint32_t worker) {
    num_restarting_ += is_restarting_.at(worker) == 0;
    is_restarting_[worker] = 1;
    for (const std::uint32_t server : slab_.plan.servers[worker]) tickets_[server].at_restart = published(server);
}

void CommandWriter::end_restart(std::uint32_t worker) {
    if (!is_restarting(worker)) return;
    is_restarting_[worker] = 0;
    --num_restarting_;
    for (const std::uint32_t server : slab_.plan.servers[worker]) publish(slab_.server_locations[server], published(server));
    notify_outbox();
    ring_worker(*slab_.workers[worker]);
}

// Rewrites the words of a worker that is gone, which it may have overwritten, from what the pool knows. Commands given before its
// restart began are done or lost. Commands given since then belong to its successor.
void CommandWriter::rewrite_control_words(std::uint32_t worker, bool is_closed) {
    WorkerControl& control = *slab_.workers.at(worker);
    const ServerWords& words = slab_.words[worker];
    reset_words(control, num_posted_[worker], is_closed);
    control.own.num_ended.store(0, std::memory_order_relaxed);
    control.own.resident_bytes.store(0, std::memory_order_relaxed);
    const std::vector<std::uint32_t>& servers = slab_.plan.servers[worker];
    for (std::uint32_t local = 0; local < servers.size(); ++local) {
        const std::uint32_t ticket = published(servers[local]);
        const bool is_done = is_published_done(servers[local]);
        const bool is_lost = !is_done && (!is_restarting_[worker] || ticket == tickets_[servers[local]].at_restart);
        const std::uint32_t last = is_done || is_lost ? ticket : ticket - 1;
        words.ticket[local].store(is_restarting_[worker] ? last : ticket, std::memory_order_relaxed);
        if (is_lost) {
            words.clear_result(local);
            words.fault[local].store(static_cast<std::uint32_t>(Fault::DIED), std::memory_order_relaxed);
        }
        words.state[local].store(state_word(last, Phase::IDLE), std::memory_order_relaxed);
        words.done[local].store(last, std::memory_order_release);
    }
    ring_pool(*slab_.pool);
}

// A dead worker may have overwritten its own words. Rewrites the words of this server from what the pool knows, and aborts its
// command. Returns whether a command was outstanding.
bool CommandWriter::abort_outstanding(std::uint32_t server) {
    const ServerLocation location = slab_.server_locations[server];
    if (is_published_done(server)) return false;
    const ServerWords& words = slab_.words[location.worker];
    words.ticket[location.local].store(published(server), std::memory_order_seq_cst);
    words.state[location.local].store(state_word(published(server) - 1, Phase::IDLE), std::memory_order_seq_cst);
    check_deaths_of(location.worker);
    return true;
}

}  // namespace stepmill
