// Resets that raise are tried again, by who has the env: nothing is lost of a step that ended an episode (SAME_STEP).
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <ctime>

#include "loop.hpp"
#include "signals.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t SLICE_NS = 5'000'000;  // how often a wait shows progress, and looks for signals and for the end

void sleep_ns(std::uint64_t duration_ns) {
    const timespec time{static_cast<time_t>(duration_ns / 1'000'000'000u), static_cast<long>(duration_ns % 1'000'000'000u)};
    nanosleep(&time, nullptr);
}

}  // namespace

// As perform_reset; a reset that raises is tried again, `attempts_left` times. Each attempt has the whole deadline, the same
// seed and the same options, and the env is not closed in between. False: the last exception is set.
bool Loop::perform_reset_again(std::uint32_t local, Result& result, bool is_automatic, std::uint32_t attempts_left) {
    ServedEnv& served = envs_[local];
    const std::uint64_t episode = served.episode;
    while (!perform_reset(local, result, is_automatic)) {
        const bool has_raised = !result.obs && !result.info;  // what is returned wrong will be wrong again
        if (attempts_left-- == 0 || !has_raised || is_learners_error() || !wait_for_retry(local)) return false;
        served.episode = episode;
        control_->num_retries.store(control_->num_retries.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        begin_activity(*control_, local, Activity::RESET);
    }
    return true;
}

// In line: whether the exception that is set comes from a signal handler of the learner.
bool Loop::is_learners_error() const {
    if (!is_inline_) return false;
    const nb::object raised = nb::steal(raised_exception());
    const bool is_learners = is_from_signal(raised);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    return is_learners;
}

// Sleeps before the next attempt, and clears the exception that is set. Returns false, with an exception set, if there is to be no
// next attempt. A restarted worker may serve before the pool notices that: until then `dead` says DIED, of its predecessor.
bool Loop::wait_for_retry(std::uint32_t local) {
    const nb::object raised = nb::steal(raised_exception());
    const std::uint64_t until = now_ns() + retry_wait_ns_;
    for (std::uint64_t now = now_ns(); now < until; now = now_ns()) {
        {
            const nb::gil_scoped_release no_gil;
            sleep_ns(std::min(SLICE_NS, until - now));
        }
        begin_activity(*control_, local, Activity::RESET);  // the deadline does not count this wait
        if (is_inline_ && PyErr_CheckSignals() != 0) return false;
        if (control_->stop.load(std::memory_order_acquire) == 0 && !is_given_up()) continue;
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
        return false;
    }
    return true;
}

}  // namespace stepmill
