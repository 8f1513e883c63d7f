#define NO_IMPORT_ARRAY
#include "worker/external_pool.hpp"
#include "shared/signals.hpp"
#include "shared/tree_visit.hpp"

#include <algorithm>
#include <cstring>

namespace stepmill {

namespace {

// The external pool makes the envs' calls.
nb::list no_envs(const Slab& slab, std::uint32_t worker) {
    nb::list envs;
    for (std::size_t num = slab.plan.servers.at(worker).size(); num > 0; --num) envs.append(nb::none());
    return envs;
}

}  // namespace

ExternalPoolLoop::ExternalPoolLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings) : Loop(slab, worker, no_envs(*slab, worker), settings), commands_(envs_.size()) {
    if (!is_plain_ || !info_.leaves.empty()) throw std::invalid_argument("an external pool must have scalar rewards, no agents, and no info of fixed shape");
    if (obs_.num_opaques != 0 || action_.num_opaques != 0 || batch_size_ != 1) throw std::invalid_argument("an external pool must use arrays of a fixed size with one row per env");
}

// ---- commands ---------------------------------------------------------------------------------------------------

nb::tuple ExternalPoolLoop::no_commands(LoopExit exit) const { return nb::make_tuple(static_cast<int>(exit), nb::none(), nb::none(), nb::none()); }

// Returns (exit, servers [k] int32, actions [k, ...], [(server, seed, options), ...]). The arrays are None if no env is to step.
nb::tuple ExternalPoolLoop::receive_commands(bool may_wait) {
    for (;;) {
        // Read the bell before the tickets: every later change rings it again.
        const std::uint32_t seen = control_->learner.bell.load(std::memory_order_acquire);
        if (control_->learner.stop.load(std::memory_order_acquire) != 0) return no_commands(LoopExit::STOP);
        if (control_->learner.requests.load(std::memory_order_acquire) != requests_seen_) {
            control_->own.serving.store(1, std::memory_order_release);
            return no_commands(LoopExit::REQUEST);
        }
        Servers steps;
        nb::list resets;
        for (std::uint32_t local = 0; local < envs_.size(); ++local) {
            const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
            if (ticket != envs_[local].done) begin(local, ticket, steps, resets);
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
    if (ticket != envs_.at(local).done && !is_later(ticket, after_ticket)) begin(local, ticket, steps, resets);
    return commands(steps, std::move(resets));
}

void ExternalPoolLoop::begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets) {
    envs_[local].done = ticket;
    if (!start_command(words_.state[local], ticket)) return;  // aborted before it began
    Command& command = commands_[local];
    command.is_outstanding = true, command.awaits_reset = false;
    command.is_reset = get_command(words_, local) == stepmill::Command::RESET;
    if (num_outstanding_++ == 0) busy_since_ns_ = now_ns();
    if (!command.is_reset) return steps.push_back(local);
    nb::object seed, options;
    if (!read_reset(local, command.held, false, seed, options)) throw nb::python_error();
    resets.append(nb::make_tuple(local, seed ? seed : nb::none(), options ? options : nb::none()));
}

nb::tuple ExternalPoolLoop::commands(const Servers& steps, nb::list resets) {
    report_progress();
    constexpr int COMMANDS = static_cast<int>(LoopExit::COMMANDS);
    if (steps.empty()) return nb::make_tuple(COMMANDS, nb::none(), nb::none(), resets);
    const nb::object servers = new_column(static_cast<npy_intp>(steps.size()), NPY_INT32);
    auto* target = data_of<std::int32_t>(servers);
    for (const std::uint32_t local : steps) *target++ = static_cast<std::int32_t>(local);
    return nb::make_tuple(COMMANDS, servers, actions_of(steps), resets);
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
    for (std::uint32_t local = 0; local < commands_.size(); ++local) {
        if (commands_[local].is_outstanding) servers.push_back(local);
    }
    return servers;
}

// ---- the end of a command ---------------------------------------------------------------------------------------

void ExternalPoolLoop::end_command(std::uint32_t local) {
    commands_[local].is_outstanding = false;
    if (--num_outstanding_ == 0) add_to(control_->own.counters.busy_ns, now_ns() - busy_since_ns_);
}

// Publishes an exception as the fault of servers. Servers without an outstanding command have their result already.
void ExternalPoolLoop::fail(nb::handle servers, nb::handle error, const char* phase) {
    for (const std::uint32_t local : parse_servers(servers)) {
        if (!commands_[local].is_outstanding) continue;
        end_command(local);
        set_exception(error.ptr());
        publish_fault(local, envs_[local].done, fault_of(phase), phase, false);
    }
    flush();
    report_progress();
}

// Reports to the reaper what the pool is doing. The first outstanding server represents all.
void ExternalPoolLoop::report_progress() {
    const auto first = num_outstanding_ == 0 ? commands_.end() : std::ranges::find_if(commands_, &Command::is_outstanding);
    const std::uint32_t current = first == commands_.end() ? NO_SERVER : static_cast<std::uint32_t>(first - commands_.begin());
    const Activity activity = current == NO_SERVER ? Activity::NONE : first->is_reset || first->awaits_reset ? Activity::RESET : Activity::STEP;
    control_->own.running.store(static_cast<std::uint32_t>(activity), std::memory_order_relaxed);
    control_->own.current.store(current, std::memory_order_release);
    control_->own.progress.store(control_->own.progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

}  // namespace stepmill
