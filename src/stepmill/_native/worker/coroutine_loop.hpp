// The loop of envs whose `reset` and `step` are coroutines: the commands of many envs run at the same time in one thread.
//
// An event loop of Python (worker/coroutines.py) awaits the coroutines, and asks here for commands:
//
//     receive_calls() ──► (env, is_reset, arguments) …     the event loop calls and awaits env.reset or env.step
//     accept(env, returned) or fail(env, error)      ──►   the next call of the same command, or None: its result is published
//
// The words of an env change as in every loop, so that the reaper and the pool see no difference; only several commands of a
// worker are RUNNING at once. `current` is the env whose code runs just now, and NO_SERVER while all of them wait.
#pragma once

#include <optional>
#include <vector>

#include <pthread.h>

#include "shared/owned_fd.hpp"
#include "worker/loop.hpp"

namespace stepmill {

// Used by one thread, with the GIL. A native thread sleeps on the worker's bell in its place, and makes an eventfd readable.
class CoroutineLoop : public Loop {
   public:
    CoroutineLoop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::list envs, nb::dict settings);  // throws std::system_error
    ~CoroutineLoop();

    int event_fd() const { return event_.number(); }  // readable when receive_calls() is to be called
    nb::tuple receive_calls();
    nb::object accept(std::uint32_t local, nb::handle returned);
    nb::object fail(std::uint32_t local, nb::handle error);
    // Commands after this ticket, if there is one, wait until the next call of hold(): a slow request comes first.
    void hold(std::uint32_t local, std::optional<std::uint32_t> after_ticket) { calls_.at(local).held_after = after_ticket; }
    void begin_request() { ++requests_seen_; }
    void end_request() { stepmill::end_request(*control_); }
    void enter(std::uint32_t local);  // the env's code runs from now on
    void leave();                     // no env's code runs
    void give_up(std::uint32_t local);
    void stop();                      // ends the native thread; idempotent

   private:
    // One env's command that runs.
    struct Call {
        Result result;
        std::uint32_t ticket = 0;         // of the newest command that was taken
        std::uint32_t attempts_left = 0;  // of a reset
        std::uint64_t episode = 0;        // the env's count of episodes before the reset
        std::uint64_t began_ns = 0;       // when the env's code began to run; 0: not yet
        bool is_reset = false, is_automatic = false;
        std::optional<std::uint32_t> held_after;
    };

    static void* watch_bell(void* self);
    nb::object begin(std::uint32_t local, std::uint32_t ticket);
    nb::object begin_reset(std::uint32_t local, bool is_automatic, std::uint32_t attempts_left);
    nb::object next_call(std::uint32_t local, nb::object arguments);
    void count_call(std::uint32_t local);
    void end(std::uint32_t local, const char* phase = nullptr);

    std::vector<Call> calls_;
    OwnedFd event_;
    pthread_t watcher_{};
    Word swept_{0};               // the bell's value before the last look at the tickets
    std::atomic<bool> is_stopping_{false};
    bool is_watching_ = false;
    std::uint32_t num_running_ = 0;
    std::uint64_t busy_since_ns_ = 0;
};

}  // namespace stepmill
