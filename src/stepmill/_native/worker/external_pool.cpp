#define NO_IMPORT_ARRAY
#include "worker/external_pool.hpp"
#include "codec/blobs.hpp"
#include "shared/tree_visit.hpp"

#include <cerrno>
#include <cstring>

namespace stepmill {

ExternalPoolLoop::ExternalPoolLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings)
    : slab_(std::move(slab)),
      worker_(worker),
      control_(slab_->workers.at(worker)),
      words_(slab_->words.at(worker)),
      pool_(slab_->pool),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      envs_(slab_->plan.servers.at(worker).size()),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation)),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      final_columns_(slab_->plan.final_observation),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      payloads_(*slab_, worker) {
    slab_->check();
    if (!slab_->plan.outcome.is_plain() || !slab_->plan.info.empty()) throw std::invalid_argument("an external pool must have scalar rewards, no agents, and no info of fixed shape");
    if (obs_.num_opaques != 0 || action_.num_opaques != 0 || slab_->plan.batch_size != 1) {
        throw std::invalid_argument("an external pool must use arrays of a fixed size with one row per env");
    }
    for (std::uint32_t local = 0; local < envs_.size(); ++local) envs_[local].ticket = words_.done[local].load(std::memory_order_acquire);
}

void ExternalPoolLoop::release() {
    describe_.reset(), unpickler_.reset();
}

int ExternalPoolLoop::traverse(visitproc visit, void* arg) const {
    Py_VISIT(describe_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

void ExternalPoolLoop::requests_seen(std::uint32_t count) {
    requests_seen_ = count;
    end_request(*control_);
}

// ---- commands ---------------------------------------------------------------------------------------------------

nb::tuple ExternalPoolLoop::no_commands(int exit) const { return nb::make_tuple(exit, nb::none(), nb::none(), nb::none()); }

// Returns (exit, servers [k] int32, actions [k, ...], [(server, seed, options), ...]). The arrays are None if no env is to step.
nb::tuple ExternalPoolLoop::receive_commands(bool may_wait) {
    for (;;) {
        // Read the bell before the tickets: every later change rings it again.
        const std::uint32_t seen = control_->bell.load(std::memory_order_acquire);
        if (control_->stop.load(std::memory_order_acquire) != 0) return no_commands(static_cast<int>(LoopExit::STOP));
        if (control_->requests.load(std::memory_order_acquire) != requests_seen_) {
            control_->serving.store(1, std::memory_order_release);
            return no_commands(static_cast<int>(LoopExit::REQUEST));
        }
        Servers steps;
        nb::list resets;
        for (std::uint32_t local = 0; local < envs_.size(); ++local) {
            const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
            if (ticket != envs_[local].ticket) begin(local, ticket, steps, resets);
        }
        if (!may_wait || !steps.empty() || nb::len(resets) != 0) return commands(steps, std::move(resets));
        wait_for_commands(*slab_, worker_, seen, spin_policy_);
    }
}

// The same for one server, whose outstanding command must run before a slow request.
nb::tuple ExternalPoolLoop::receive_command(std::uint32_t local, std::uint32_t after_ticket) {
    const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
    Servers steps;
    nb::list resets;
    if (ticket != envs_.at(local).ticket && !is_later(ticket, after_ticket)) begin(local, ticket, steps, resets);
    return commands(steps, std::move(resets));
}

void ExternalPoolLoop::begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets) {
    ExternalEnv& env = envs_[local];
    env.ticket = ticket;
    if (!start_command(words_.state[local], ticket)) return;  // aborted before it began
    env.is_reset = get_command(words_, local) == Command::RESET;
    env.awaits_reset = false;
    env.is_outstanding = true;
    if (num_outstanding_++ == 0) busy_since_ns_ = now_ns();
    if (env.is_reset) {
        resets.append(reset_arguments(local));
    } else {
        steps.push_back(local);
    }
}

nb::tuple ExternalPoolLoop::commands(const Servers& steps, nb::list resets) {
    report_progress();
    if (steps.empty()) return nb::make_tuple(EXTERNAL_COMMANDS, nb::none(), nb::none(), resets);
    const nb::object servers = new_column(static_cast<npy_intp>(steps.size()), NPY_INT32);
    auto* target = data_of<std::int32_t>(servers);
    for (const std::uint32_t local : steps) *target++ = static_cast<std::int32_t>(local);
    return nb::make_tuple(EXTERNAL_COMMANDS, servers, actions_of(steps), resets);
}

nb::object ExternalPoolLoop::reset_arguments(std::uint32_t local) {
    nb::object seed = nb::none(), options = nb::none();
    if (words_.flags[local] & FLAG_BLOB) {
        if (!read_blob_bytes(*slab_, worker_, local, buffer_)) throw std::runtime_error("the options of a reset could not be read");
        const nb::object blob = checked(decode(buffer_.data(), buffer_.size(), {unpickler_.ptr(), nullptr}));
        seed = blob[0], options = blob[1];
    }
    if (words_.flags[local] & FLAG_SEED) seed = nb::int_(words_.seed[local]);
    return nb::make_tuple(local, seed, options);
}

// Returns the actions [k, ...] in the structure of the action space, in the order of `steps`.
nb::object ExternalPoolLoop::actions_of(const Servers& steps) const {
    auto make_leaf = [&](const Node& node) -> PyObject* {
        const Leaf& leaf = action_.leaves[static_cast<std::size_t>(node.index)];
        PyObject* array = new_array(leaf, static_cast<npy_intp>(steps.size()));
        if (array == nullptr) return nullptr;
        auto* target = static_cast<std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)));
        for (const std::uint32_t local : steps) {
            std::memcpy(target, slab_->base + leaf.column.at(0, words_.row[local]), leaf.row_bytes);
            target += leaf.row_bytes;
        }
        return array;
    };
    return checked(build_tree(action_.root, make_leaf, [](const Node&) -> PyObject* { return nullptr; }));
}

std::vector<std::uint32_t> ExternalPoolLoop::outstanding() const {
    Servers servers;
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        if (envs_[local].is_outstanding) servers.push_back(local);
    }
    return servers;
}

// ---- the end of a command ---------------------------------------------------------------------------------------

void ExternalPoolLoop::end_command(std::uint32_t local) {
    envs_[local].is_outstanding = false;
    if (--num_outstanding_ == 0) add_to(control_->busy_ns, now_ns() - busy_since_ns_);
}

void ExternalPoolLoop::finish(std::uint32_t local) {
    // The release store makes every byte of the result visible to a thread that reads done == ticket.
    words_.done[local].store(envs_[local].ticket, std::memory_order_release);
    ++group_;
}

void ExternalPoolLoop::flush() {
    if (group_ != 0) count_results(*pool_, std::exchange(group_, 0));
}

// Publishes an exception as the fault of servers. Servers without an outstanding command have their result already.
void ExternalPoolLoop::fail(nb::handle servers, nb::handle error, const char* phase) {
    for (const std::uint32_t local : parse_servers(servers)) {
        if (!envs_[local].is_outstanding) continue;
        end_command(local);
        if (!claim_result(words_.state[local], envs_[local].ticket)) continue;
        write_fault(local, error, phase);
        finish(local);
    }
    flush();
    report_progress();
}

// Never throws, and leaves no exception set. If the record cannot be written, the fault has no text.
void ExternalPoolLoop::write_fault(std::uint32_t local, nb::handle error, const char* phase) {
    const bool is_output = phase[0] == 'o';  // "output of …": the pool returned something invalid
    words_.clear_result(local);
    envs_[local].needs_reset = autoreset_ == Autoreset::NEXT_STEP;
    try {
        buffer_.clear();
        if (!encoder_.encode(nb::object(describe_(error, phase)).ptr(), buffer_) || !payloads_.write(local, buffer_)) throw nb::python_error();
    } catch (nb::python_error&) {
    }
    words_.fault[local].store(static_cast<std::uint32_t>(is_output ? Fault::BAD_OUTPUT : Fault::RAISED), std::memory_order_relaxed);
}

// Reports to the reaper what the pool is doing. The first outstanding server represents all.
void ExternalPoolLoop::report_progress() {
    std::uint32_t current = NO_SERVER;
    for (std::uint32_t local = 0; num_outstanding_ != 0 && local < envs_.size() && current == NO_SERVER; ++local) {
        if (envs_[local].is_outstanding) current = local;
    }
    const Command command = current == NO_SERVER ? Command::NONE : envs_[current].is_reset || envs_[current].awaits_reset ? Command::RESET : Command::STEP;
    control_->running.store(static_cast<std::uint32_t>(command), std::memory_order_relaxed);
    control_->current.store(current, std::memory_order_release);
    control_->progress.store(control_->progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

}  // namespace stepmill
