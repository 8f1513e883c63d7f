#define NO_IMPORT_ARRAY
#include "blobs.hpp"
#include "foreign.hpp"
#include "walks.hpp"

#include <cerrno>
#include <cstring>

namespace stepmill {

namespace {

template <typename Counter>
void add(Counter& counter, std::uint64_t amount) {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

ForeignLoop::ForeignLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::dict settings)
    : slab_(std::move(slab)),
      worker_(worker),
      control_(slab_->workers.at(worker)),
      words_(slab_->words.at(worker)),
      pool_(slab_->pool),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      seats_(slab_->plan.servers.at(worker).size()),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation)),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      final_columns_(slab_->plan.final_observation),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      overflow_(slab_->result_fds.at(worker), seats_.size()) {
    slab_->check();
    if (!slab_->plan.outcome.is_plain() || !slab_->plan.info.empty()) throw std::invalid_argument("a foreign pool has one number as reward, no agents, and no info of fixed shape");
    if (obs_.num_opaques != 0 || action_.num_opaques != 0 || slab_->plan.batch_size != 1) {
        throw std::invalid_argument("a foreign pool gives and takes arrays of a fixed size, one row per env");
    }
    for (std::uint32_t local = 0; local < seats_.size(); ++local) seats_[local].taken = words_.done[local].load(std::memory_order_acquire);
}

void ForeignLoop::release() {
    describe_.reset(), unpickler_.reset();
    for (ForeignSeat& seat : seats_) seat.held_info.reset();
}

int ForeignLoop::traverse(visitproc visit, void* arg) const {
    for (const ForeignSeat& seat : seats_) Py_VISIT(seat.held_info.ptr());
    Py_VISIT(describe_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

void ForeignLoop::requests_seen(std::uint32_t count) {
    requests_seen_ = count;
    end_request(*control_);
}

// ---- commands ---------------------------------------------------------------------------------------------------

nb::tuple ForeignLoop::nothing(int exit) const { return nb::make_tuple(exit, nb::none(), nb::none(), nb::none()); }

// (exit, servers [k] int32, actions [k, ...], [(server, seed, options), ...]); the arrays are None where nobody is to step.
nb::tuple ForeignLoop::take(bool may_wait) {
    for (;;) {
        // The bell is read before the tickets: what comes after this line rings it again.
        const std::uint32_t seen = control_->bell.load(std::memory_order_acquire);
        if (control_->stop.load(std::memory_order_acquire) != 0) return nothing(static_cast<int>(LoopExit::STOP));
        if (control_->requests.load(std::memory_order_acquire) != requests_seen_) {
            control_->serving.store(1, std::memory_order_release);
            return nothing(static_cast<int>(LoopExit::REQUEST));
        }
        Servers steps;
        nb::list resets;
        for (std::uint32_t local = 0; local < seats_.size(); ++local) {
            const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
            if (ticket != seats_[local].taken) begin(local, ticket, steps, resets);
        }
        if (!may_wait || !steps.empty() || nb::len(resets) != 0) return commands(steps, std::move(resets));
        wait(seen);
    }
}

// The same for one server, whose outstanding command precedes a slow request.
nb::tuple ForeignLoop::take_one(std::uint32_t local, std::uint32_t after_ticket) {
    const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
    Servers steps;
    nb::list resets;
    if (ticket != seats_.at(local).taken && static_cast<std::int32_t>(after_ticket - ticket) >= 0) begin(local, ticket, steps, resets);
    return commands(steps, std::move(resets));
}

void ForeignLoop::begin(std::uint32_t local, std::uint32_t ticket, Servers& steps, nb::list& resets) {
    ForeignSeat& seat = seats_[local];
    seat.taken = ticket;
    if (!take_command(words_.state[local], ticket)) return;  // condemned before it began
    seat.is_reset = get_command(words_, local) == Command::RESET;
    seat.is_held = false;
    seat.is_flying = true;
    if (num_flying_++ == 0) busy_since_ns_ = now_ns();
    if (seat.is_reset) {
        resets.append(reset_order(local));
    } else {
        steps.push_back(local);
    }
}

nb::tuple ForeignLoop::commands(const Servers& steps, nb::list resets) {
    report_progress();
    if (steps.empty()) return nb::make_tuple(FOREIGN_COMMANDS, nb::none(), nb::none(), resets);
    auto num = static_cast<npy_intp>(steps.size());
    nb::object servers = nb::steal(PyArray_SimpleNew(1, &num, NPY_INT32));
    if (!servers) throw nb::python_error();
    auto* target = static_cast<std::int32_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(servers.ptr())));
    for (const std::uint32_t local : steps) *target++ = static_cast<std::int32_t>(local);
    return nb::make_tuple(FOREIGN_COMMANDS, servers, actions_of(steps), resets);
}

nb::object ForeignLoop::reset_order(std::uint32_t local) {
    nb::object seed = nb::none(), options = nb::none();
    if (words_.flags[local] & FLAG_BLOB) {
        const bool is_read = read_blob_bytes(*slab_, worker_, local, buffer_);
        const nb::object blob = nb::steal(is_read ? decode(buffer_.data(), buffer_.size(), {unpickler_.ptr(), nullptr}) : nullptr);
        if (is_read && !blob) throw nb::python_error();
        if (!is_read) throw std::runtime_error("a reset's options could not be read back");
        seed = blob[0], options = blob[1];
    }
    if (words_.flags[local] & FLAG_SEED) seed = nb::int_(words_.seed[local]);
    return nb::make_tuple(local, seed, options);
}

// [k, ...] arrays in the structure of the action, in the order of `steps`.
nb::object ForeignLoop::actions_of(const Servers& steps) const {
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
    nb::object actions = nb::steal(build_tree(action_.root, make_leaf, [](const Node&) -> PyObject* { return nullptr; }));
    if (!actions) throw nb::python_error();
    return actions;
}

nb::list ForeignLoop::flying() const {
    nb::list servers;
    for (std::uint32_t local = 0; local < seats_.size(); ++local) {
        if (seats_[local].is_flying) servers.append(local);
    }
    return servers;
}

// ---- the end of a command ---------------------------------------------------------------------------------------

void ForeignLoop::land(std::uint32_t local) {
    seats_[local].is_flying = false;
    if (--num_flying_ == 0) add(control_->env_ns, now_ns() - busy_since_ns_);
}

void ForeignLoop::finish(std::uint32_t local) {
    // The release makes every byte of the result visible to who sees done == ticket.
    words_.done[local].store(seats_[local].taken, std::memory_order_release);
    ++group_;
}

void ForeignLoop::flush() {
    if (group_ != 0) count_results(*pool_, std::exchange(group_, 0));
}

void ForeignLoop::store_payload(std::uint32_t local) {
    if (buffer_.size() <= slab_->plan.payload.row_bytes) {
        std::memcpy(slab_->payload(words_.row[local]), buffer_.data(), buffer_.size());
    } else {
        OverflowRef ref;
        const int error = overflow_.write(local, buffer_.data(), buffer_.size(), ref);
        if (error != 0) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        words_.payload_offset[local] = ref.offset;
        words_.payload_generation[local] = ref.generation;
        words_.result[local] |= RESULT_REMOTE;
    }
    words_.payload_bytes[local] = buffer_.size();
}

// Turns an exception into the fault of servers. Those that are not flying have their result already.
void ForeignLoop::fail(nb::handle servers, nb::handle error, const char* phase) {
    for (const std::uint32_t local : parse_servers(servers)) {
        if (!seats_[local].is_flying) continue;
        land(local);
        if (!claim_result(words_.state[local], seats_[local].taken)) continue;
        write_fault(local, error, phase);
        finish(local);
    }
    flush();
    report_progress();
}

// Never throws, and leaves no exception set: a fault without its words is still one.
void ForeignLoop::write_fault(std::uint32_t local, nb::handle error, const char* phase) {
    const bool is_output = phase[0] == 'o';  // "output of …": the pool returned, but not what a pool returns
    words_.result[local] = 0;
    words_.payload_bytes[local] = 0;
    seats_[local].needs_reset = autoreset_ == Autoreset::NEXT_STEP;
    try {
        buffer_.clear();
        if (!encoder_.encode(nb::object(describe_(error, phase)).ptr(), buffer_)) throw nb::python_error();
        store_payload(local);
    } catch (nb::python_error&) {
    }
    words_.fault[local].store(static_cast<std::uint32_t>(is_output ? Fault::BAD_OUTPUT : Fault::RAISED), std::memory_order_relaxed);
}

// What the pool is at, for who watches deadlines: the first of those that fly stands for all.
void ForeignLoop::report_progress() {
    std::uint32_t current = NO_SERVER;
    for (std::uint32_t local = 0; num_flying_ != 0 && local < seats_.size() && current == NO_SERVER; ++local) {
        if (seats_[local].is_flying) current = local;
    }
    const Command command = current == NO_SERVER ? Command::NONE : seats_[current].is_reset || seats_[current].is_held ? Command::RESET : Command::STEP;
    control_->running.store(static_cast<std::uint32_t>(command), std::memory_order_relaxed);
    control_->current.store(current, std::memory_order_release);
    control_->progress.store(control_->progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void ForeignLoop::wait(std::uint32_t seen) {
    PyThreadState* thread = PyEval_SaveThread();
    const std::uint64_t waited_ns = sleep_on_bell(*pool_, *control_, worker_, seen, patience_);
    add(control_->wait_ns, waited_ns);
    PyEval_RestoreThread(thread);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace stepmill
