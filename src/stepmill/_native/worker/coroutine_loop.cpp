#define NO_IMPORT_ARRAY
#include "worker/coroutine_loop.hpp"
#include "shared/forks.hpp"
#include "shared/native_thread.hpp"

#include <ctime>
#include <system_error>

#include <sys/eventfd.h>

namespace stepmill {

namespace {

constexpr std::uint64_t WATCH_NS = 100'000'000;  // how long the native thread sleeps at a time

}  // namespace

CoroutineLoop::CoroutineLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::list envs, nb::dict settings)
    : Loop(std::move(slab), worker, envs, settings), calls_(envs_.size()), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), swept_(control_->learner.bell.load()) {
    for (std::uint32_t local = 0; local < calls_.size(); ++local) calls_[local].ticket = envs_[local].done;
    const int error = event_.number() < 0 ? errno : start_native_thread(watcher_, &CoroutineLoop::watch_bell, this);
    if (error != 0) throw std::system_error(error, std::generic_category(), "the thread that waits for commands cannot be started");
    is_watching_ = true;
}

CoroutineLoop::~CoroutineLoop() { stop(); }

// ---- commands ---------------------------------------------------------------------------------------------------

// The native thread: makes the eventfd readable when the bell has moved since the last look at the tickets.
void* CoroutineLoop::watch_bell(void* self) {
    auto& loop = *static_cast<CoroutineLoop*>(self);
    WorkerControl& control = *loop.control_;
    while (!loop.is_stopping_.load(std::memory_order_acquire)) {
        const std::uint32_t swept = loop.swept_.load(std::memory_order_acquire);
        if (control.learner.bell.load(std::memory_order_acquire) == swept) {
            park(control.learner.bell, control.own.parked, swept, WATCH_NS);
        } else {
            set_event(loop.event_.number());
            futex_wait(loop.swept_, swept, WATCH_NS);
        }
    }
    return nullptr;
}

void CoroutineLoop::stop() {
    if (!std::exchange(is_watching_, false) || fork_generation_ != fork_count.load(std::memory_order_relaxed)) return;
    is_stopping_.store(true, std::memory_order_release);
    const nb::gil_scoped_release no_gil;
    futex_wake_all(control_->learner.bell);
    futex_wake_all(swept_);
    pthread_join(watcher_, nullptr);
}

// Returns (exit, [(env, is_reset, arguments) ...]). The exit is REQUEST before a command that a slow request may have to precede. The arguments are an action, or the keyword arguments of a reset.
nb::tuple CoroutineLoop::receive_calls() {
    clear_event(event_.number());
    swept_.store(control_->learner.bell.load(std::memory_order_acquire), std::memory_order_release);
    futex_wake_all(swept_);
    nb::list calls;
    const auto returned = [&](LoopExit exit) { return nb::make_tuple(static_cast<int>(exit), calls); };
    if (control_->learner.stop.load(std::memory_order_acquire) != 0 || is_abandoned()) return returned(LoopExit::STOP);
    for (std::uint32_t local = 0; local < calls_.size(); ++local) {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        if (ticket == calls_[local].ticket || (calls_[local].held_after && is_later(ticket, *calls_[local].held_after))) continue;
        if (control_->learner.requests.load(std::memory_order_acquire) != requests_seen_) break;
        if (const nb::object arguments = begin(local, ticket)) calls.append(nb::make_tuple(local, calls_[local].is_reset, arguments));
    }
    if (control_->learner.requests.load(std::memory_order_acquire) == requests_seen_) return returned(LoopExit::COMMANDS);
    control_->own.serving.store(1, std::memory_order_release);
    return returned(LoopExit::REQUEST);
}

// Returns the arguments of a command's first call; null if the command was aborted, or has failed already.
nb::object CoroutineLoop::begin(std::uint32_t local, std::uint32_t ticket) {
    Call& call = calls_[local];
    call.ticket = envs_[local].done = ticket;
    if (!start_command(words_.state[local], ticket)) return {};
    if (num_running_++ == 0) busy_since_ns_ = now_ns();
    const bool is_reset = get_command(words_, local) == Command::RESET;
    if (is_reset || is_reset_due(local)) return next_call(local, begin_reset(local, !is_reset, reset_retries_));
    call.is_reset = false;
    return next_call(local, read_action(local));
}

// Returns the keyword arguments of an attempt of a reset; null with an exception set.
nb::object CoroutineLoop::begin_reset(std::uint32_t local, bool is_automatic, std::uint32_t attempts_left) {
    Call& call = calls_[local];
    call.is_reset = true, call.is_automatic = is_automatic;
    call.attempts_left = attempts_left, call.episode = envs_[local].seeds.episode;
    nb::object seed, options;
    if (!read_reset(local, call.result, is_automatic, seed, options)) return {};
    nb::dict arguments;
    if (seed || options) arguments["seed"] = seed ? seed : nb::none();
    if (options) arguments["options"] = options;
    return arguments;
}

// Returns the arguments; if they are null, publishes the exception.
nb::object CoroutineLoop::next_call(std::uint32_t local, nb::object arguments) {
    calls_[local].began_ns = 0;
    if (!arguments) end(local, calls_[local].is_reset ? "reset" : "action");
    return arguments;
}

// ---- results ----------------------------------------------------------------------------------------------------

// Takes what a call returned. Returns the arguments of the reset that belongs to the same command (SAME_STEP), or null: the result is
// published.
nb::object CoroutineLoop::accept(std::uint32_t local, nb::handle returned) {
    count_call(local);
    Call& call = calls_.at(local);
    const char* phase = "output of reset";
    bool has_reset = false;
    const bool is_valid = call.is_reset ? unpack_reset(returned.ptr(), call.result) : accept_step(local, returned.ptr(), call.result, phase, has_reset);
    if (is_valid && has_reset) return next_call(local, begin_reset(local, true, reset_retries_));
    end(local, is_valid ? nullptr : phase);
    return {};
}

// Takes what a call raised. Returns the arguments of the next attempt of a reset, or null: the fault is published.
nb::object CoroutineLoop::fail(std::uint32_t local, nb::handle error) {
    count_call(local);
    const Call& call = calls_.at(local);
    if (call.is_reset && call.attempts_left != 0) {
        envs_[local].seeds.episode = call.episode;
        add_to(control_->own.counters.num_retries, 1);
        return next_call(local, begin_reset(local, call.is_automatic, call.attempts_left - 1));
    }
    set_exception(error.ptr());
    end(local, call.is_reset ? "reset" : "step");
    return {};
}

void CoroutineLoop::count_call(std::uint32_t local) {
    const Call& call = calls_.at(local);
    const std::uint64_t now = now_ns(), began = call.began_ns == 0 ? now : call.began_ns;
    ServerCounters& counters = words_.counters[local];
    (call.is_reset ? counters.reset : counters.step).add(now - began, 1, now - began);
    add_to(call.is_reset ? control_->own.counters.num_resets : control_->own.counters.num_steps, 1);
    if (WorkerTrace* trace = slab_->worker_trace(worker_)) trace->add(call.is_reset ? TraceKind::RESET : TraceKind::STEP, slab_->plan.servers[worker_][local], began, now);
}

// Publishes the result of a command or, if a phase is given, the current exception.
void CoroutineLoop::end(std::uint32_t local, const char* phase) {
    Call& call = calls_[local];
    if (--num_running_ == 0) add_to(control_->own.counters.busy_ns, now_ns() - busy_since_ns_);
    if (phase == nullptr) publish(local, call.ticket, call.result);
    else publish_fault(local, call.ticket, fault_of(phase), phase, false);
    call.result = Result();
    flush();
}

// ---- what the reaper sees -----------------------------------------------------------------------------------------

void CoroutineLoop::enter(std::uint32_t local) {
    Call& call = calls_.at(local);
    begin_activity(*control_, local, call.is_reset ? Activity::RESET : Activity::STEP);
    if (call.began_ns == 0) call.began_ns = now_ns();
}

void CoroutineLoop::leave() {
    end_forked_copy();
    end_activity(*control_);
}

// Waits until the reaper has ended the worker, because an env that is too late goes on although it was cancelled.
void CoroutineLoop::give_up(std::uint32_t local) {
    constexpr timespec SLICE{0, 1'000'000};
    begin_activity(*control_, local, Activity::GIVEN_UP);
    const nb::gil_scoped_release no_gil;
    while (control_->learner.stop.load(std::memory_order_acquire) == 0 && !is_abandoned()) nanosleep(&SLICE, nullptr);
}

}  // namespace stepmill
