#define NO_IMPORT_ARRAY
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "worker/loop.hpp"
#include "shared/forks.hpp"
#include "shared/signals.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t RETRY_SLICE_NS = 5'000'000;  // during a wait: how often the worker shows progress, and looks for signals and `stop`

void sleep_ns(std::uint64_t duration_ns) {
    const timespec time{static_cast<time_t>(duration_ns / 1'000'000'000u), static_cast<long>(duration_ns % 1'000'000'000u)};
    nanosleep(&time, nullptr);
}

}  // namespace

Loop::Loop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::list envs, nb::dict settings)
    : slab_(std::move(slab)),
      objects_(LocalObjects::find(slab_->id)),
      worker_(worker),
      control_(slab_->workers.at(worker)),
      words_(slab_->words.at(worker)),
      pool_(slab_->pool),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      seeding_(static_cast<Seeding>(nb::cast<int>(settings["seeding"]))),
      is_batched_(nb::cast<bool>(settings["batched"])),
      has_overlap_(nb::cast<bool>(settings["overlap"])),
      measures_memory_(nb::cast<bool>(settings["measures_memory"])),
      is_inline_(nb::cast<bool>(settings["inline"])),
      reset_retries_(nb::cast<std::uint32_t>(settings["reset_retries"])),
      retry_wait_ns_(nb::cast<std::uint64_t>(settings["retry_wait_ns"])),
      batch_size_(slab_->plan.batch_size),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation).allow_more_keys()),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      info_(Tree::parse(settings["info"], settings["info_leaves"], slab_->plan.info)),
      reward_(parse_leaf(settings["reward"], slab_->plan.outcome.reward)),
      is_plain_(slab_->plan.outcome.is_plain()),
      final_columns_(slab_->plan.final_observation),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      payloads_(*slab_, worker),
      fork_generation_(watch_forks()),
      reset_names_(nb::make_tuple("seed", "options")),
      seed_name_(nb::make_tuple("seed")),
      no_info_(nb::dict()) {
    slab_->check();
    reward_.path = "reward";
    for (Leaf& leaf : info_.leaves) leaf.path = "info" + leaf.path;
    if (const nb::object time_step = settings["time_step"]; !time_step.is_none()) {
        is_time_step_ = true;
        step_type_at_ = nb::cast<Py_ssize_t>(time_step[0]), reward_at_ = nb::cast<Py_ssize_t>(time_step[1]), discount_at_ = nb::cast<Py_ssize_t>(time_step[2]);
    }
    for (nb::handle env : envs) {
        ServedEnv served;
        served.env = nb::borrow(env);
        served.episode_return.assign(batch_size_ * slab_->plan.outcome.num_rewards, 0.0);
        served.alive.assign(slab_->plan.outcome.num_agents, 1);
        served.episode_length.assign(batch_size_, 0);
        served.ended.assign(batch_size_, 0);
        served.done = words_.done[envs_.size()].load(std::memory_order_acquire);
        envs_.push_back(std::move(served));
    }
    refresh();
}

void Loop::refresh() {
    for (ServedEnv& served : envs_) {
        if (served.env.is_none()) continue;  // the envs of a CoroutineLoop are called by Python
        served.step = served.env.attr("step");
        served.reset = served.env.attr("reset");
    }
}

void Loop::release() {
    envs_.clear();
    describe_.reset(), unpickler_.reset();
    cached_scalars_.fill(nb::object());
    interrupt_.reset();
}

int Loop::traverse(visitproc visit, void* arg) const {
    for (const ServedEnv& served : envs_) {
        Py_VISIT(served.env.ptr());
        Py_VISIT(served.step.ptr());
        Py_VISIT(served.reset.ptr());
        Py_VISIT(served.early_obs.ptr());
        Py_VISIT(served.early_info.ptr());
        Py_VISIT(served.early_error.ptr());
    }
    Py_VISIT(describe_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    Py_VISIT(interrupt_.ptr());
    return 0;
}

// ---- the loop ---------------------------------------------------------------------------------------------------

LoopExit Loop::run() {
    for (;;) {
        // Read the bell before the tickets: every later change rings it again.
        const std::uint32_t seen = control_->learner.bell.load(std::memory_order_acquire);
        if (control_->learner.stop.load(std::memory_order_acquire) != 0 || is_abandoned()) return LoopExit::STOP;
        bool is_interrupted = false;
        const bool has_worked = sweep(is_interrupted);
        if (is_interrupted || control_->learner.requests.load(std::memory_order_acquire) != requests_seen_) {
            control_->own.serving.store(1, std::memory_order_release);
            return LoopExit::REQUEST;
        }
        const bool is_patient = has_worked && ++passed_ < MAX_PASSED;
        const bool has_staged = !is_patient && run_staged_reset();
        if (!has_worked && !has_staged && !(has_overlap_ && reset_early())) {
            const std::uint64_t waited_ns = wait_for_commands(*slab_, worker_, seen, spin_policy_);
            unclaimed_time_.claim(waited_ns, now_ns());
        }
        if (PyErr_Occurred()) throw nb::python_error();
    }
}

// Runs all outstanding commands, in server order. Stops before a command if a slow request may have to precede it.
bool Loop::sweep(bool& is_interrupted) {
    bool has_worked = false;
    std::uint64_t began = 0;
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        if (ticket == envs_[local].done || is_staged(local)) continue;
        if (control_->learner.requests.load(std::memory_order_acquire) != requests_seen_) {
            is_interrupted = true;
            break;
        }
        if (!has_worked) began = now_ns();
        has_worked = true;
        run_command(local, ticket);
    }
    if (!has_worked) return false;
    flush();
    const std::uint64_t spent = now_ns() - began;
    add_to(control_->own.counters.busy_ns, spent);
    return true;
}

// Runs one reset with a staging row as target, if there is one. Commands with a waiting caller come first.
bool Loop::run_staged_reset() {
    passed_ = 0;
    if (slab_->plan.staging.empty()) return false;
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        const bool is_waiting = words_.ticket[local].load(std::memory_order_acquire) != envs_[local].done && is_staged(local);
        if (!is_waiting) continue;
        return control_->learner.requests.load(std::memory_order_acquire) == requests_seen_ && run_server(local);
    }
    return false;
}

bool Loop::run_server(std::uint32_t local) {
    const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
    if (ticket == envs_[local].done) return false;
    if (is_inline_) {
        run_inline(local, ticket);
        return true;
    }
    const std::uint64_t began = now_ns();
    run_command(local, ticket);
    flush();
    add_to(control_->own.counters.busy_ns, now_ns() - began);
    return true;
}

// Hot path. If another thread closes the pool meanwhile, it waits in wait_idle() until the command ends.
void Loop::run_inline(std::uint32_t local, std::uint32_t ticket) {
    struct Runner {
        explicit Runner(Loop& of) : loop(of) {
            loop.is_running_.store(1, std::memory_order_relaxed);
            loop.runner_.store(PyThread_get_thread_ident(), std::memory_order_relaxed);
        }
        ~Runner() {
            loop.runner_.store(0, std::memory_order_relaxed);
            loop.is_running_.store(0, std::memory_order_release);
            if (loop.control_->learner.stop.load(std::memory_order_relaxed) != 0) futex_wake_all(loop.is_running_);
        }
        Loop& loop;
    };
    const Runner runner(*this);
    // The thread that closes the pool sets `stop` and then looks for a runner. Both hold the GIL, so one of them sees the other.
    if (control_->learner.stop.load(std::memory_order_relaxed) == 0) run_command(local, ticket);
}

bool Loop::wait_idle(double timeout_s) {
    constexpr std::uint64_t SLICE_NS = 10'000'000;
    if (runner_.load(std::memory_order_relaxed) == PyThread_get_thread_ident()) return true;
    const nb::gil_scoped_release no_gil;
    return wait_until_zero(is_running_, to_ns(timeout_s), SLICE_NS);
}

void Loop::run_until(std::uint32_t local, std::uint32_t after_ticket) {
    const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
    if (ticket != envs_[local].done && !is_later(ticket, after_ticket)) run_server(local);
}

// Flat: the functions of a step are inlined, also those that another loop calls, except what is declared noinline.
[[gnu::flatten]] void Loop::run_command(std::uint32_t local, std::uint32_t ticket) {
    ServedEnv& served = envs_[local];
    if (!is_inline_ && !start_command(words_.state[local], ticket)) {
        served.done = ticket;  // aborted before it began
        return;
    }
    begin_activity(*control_, local, static_cast<Activity>(get_command(words_, local)));
    Result result;
    const char* phase = "step";
    if (perform(local, result, phase)) {
        publish(local, ticket, result);
    } else {
        publish_fault(local, ticket, fault_of(phase), phase, false);
    }
    served.done = ticket;
    end_activity(*control_);
}

// Whether the reaper gave this worker up. A thread that returns from a hanging env then ends, in favour of its successor; a process is
// usually killed before. A successor may start while `dead` is still DIED.
bool Loop::is_abandoned() const { return control_->learner.dead.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Death::OVERDUE); }

// Ends this process if it is a copy of the worker that an env forked and that has returned from the env, for example after an exception
// or sys.exit(): only the worker itself may carry out commands.
void Loop::end_forked_copy() {
    if (is_inline_ || fork_generation_ == fork_count.load(std::memory_order_relaxed)) return;
    int status = EXIT_FORKED_COPY;
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_SystemExit)) {
        const nb::object error = nb::steal(raised_exception());
        const nb::object code = nb::getattr(error, "code", nb::none());
        status = code.is_none() ? 0 : PyLong_Check(code.ptr()) ? static_cast<int>(PyLong_AsLong(code.ptr())) : 1;
    } else {
        if (PyErr_Occurred()) PyErr_PrintEx(0);
        PySys_WriteStderr("stepmill: an env forked a process that returned from step() or reset(), and stepmill ends it; end such a process with os._exit() in the env\n");
    }
    _exit(status);
}

// ---- waiting ----------------------------------------------------------------------------------------------------

std::uint64_t wait_for_commands(const Slab& slab, std::uint32_t worker, std::uint32_t seen, SpinPolicy& spin_policy) {
    PyThreadState* thread = PyEval_SaveThread();
    WorkerControl& control = *slab.workers[worker];
    const std::uint64_t waited_ns = sleep_on_bell(*slab.pool, control, worker, seen, spin_policy);
    add_to(control.own.counters.wait_ns, waited_ns);
    if (WorkerTrace* trace = slab.worker_trace(worker)) {
        const std::uint64_t now = now_ns();
        trace->add(TraceKind::WAIT, 0, now - waited_ns, now);
    }
    PyEval_RestoreThread(thread);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return waited_ns;
}

// ---- resets that raise are tried again by the worker: nothing is lost of a step that ended an episode (SAME_STEP) ----

// Calls perform_reset up to 1 + attempts_left times until it succeeds. Each attempt has the full deadline, the same seed and the same
// options; the env is not closed in between. Returns false with the last exception set.
bool Loop::reset_with_retries(std::uint32_t local, Result& result, bool is_automatic, std::uint32_t attempts_left) {
    ServedEnv& served = envs_[local];
    const std::uint64_t episode = served.seeds.episode;
    while (!perform_reset(local, result, is_automatic)) {
        const bool has_raised = !result.obs && !result.info;  // an invalid value would be returned again
        if (attempts_left-- == 0 || !has_raised || is_signal_error() || !wait_for_retry(local)) return false;
        served.seeds.episode = episode;
        add_to(control_->own.counters.num_retries, 1);
        begin_activity(*control_, local, Activity::RESET);
    }
    return true;
}

// Serial backend: whether the current exception comes from a signal handler of the learner.
bool Loop::is_signal_error() const {
    if (!is_inline_) return false;
    const nb::object raised = nb::steal(raised_exception());
    const bool is_learners = is_from_signal(raised);
    set_exception(raised.ptr());
    return is_learners;
}

// Sleeps before the next attempt and clears the current exception. Returns false, with an exception set, if there must be no further
// attempt. A restarted worker may serve before the pool notices: until then `dead` is DIED because of its predecessor.
bool Loop::wait_for_retry(std::uint32_t local) {
    const nb::object raised = nb::steal(raised_exception());
    const std::uint64_t until = now_ns() + retry_wait_ns_;
    for (std::uint64_t now = now_ns(); now < until; now = now_ns()) {
        {
            const nb::gil_scoped_release no_gil;
            sleep_ns(std::min(RETRY_SLICE_NS, until - now));
        }
        begin_activity(*control_, local, Activity::RESET);  // the deadline does not include this wait
        if (is_inline_ && PyErr_CheckSignals() != 0) return false;
        if (control_->learner.stop.load(std::memory_order_acquire) == 0 && !is_abandoned()) continue;
        set_exception(raised.ptr());
        return false;
    }
    return true;
}

// ---- overlapped resets: a worker with nothing else to do begins the next episode before it is asked for -------------

// Begins the next episode of one env whose last episode ended, while the worker is idle. Returns false if there is no such env.
bool Loop::reset_early() {
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        ServedEnv& served = envs_[local];
        if (!served.needs_reset || served.is_early || words_.fault[local].load(std::memory_order_relaxed) != 0) continue;
        const std::uint64_t began = now_ns();
        Result result;
        served.is_early = true;
        if (perform_reset(local, result, true)) {
            served.early_obs = std::move(result.obs);
            served.early_info = std::move(result.info);
            served.early_alive = std::move(result.alive);
        } else {
            served.early_phase = result.info && !result.obs ? "output of reset" : "reset";
            served.early_error = nb::steal(raised_exception());
        }
        end_activity(*control_);
        add_to(control_->own.counters.busy_ns, now_ns() - began);
        return true;
    }
    return false;
}

// Whether an explicit reset asks for the episode that was begun early.
bool Loop::matches_early_reset(std::uint32_t local) const {
    const ServedEnv& served = envs_[local];
    if (words_.flags[local] == 0) return true;
    const bool is_named = words_.flags[local] == (FLAG_SEED | FLAG_EPISODE);
    return is_named && served.seeds.has_seed && words_.seed[local] == served.seeds.base && words_.episode[local] == served.seeds.episode;
}

// Makes the outcome of the early reset, which may be a fault, the result of the current command.
bool Loop::use_early_reset(std::uint32_t local, Result& result, const char*& phase) {
    ServedEnv& served = envs_[local];
    served.is_early = false;
    if (served.early_error) {
        phase = served.early_phase;
        set_exception(served.early_error.ptr());
        served.early_error.reset();
        return false;
    }
    result.obs = std::move(served.early_obs);
    result.info = std::move(served.early_info);
    result.alive = std::move(served.early_alive);
    served.early_alive.clear();
    served.early_obs.reset(), served.early_info.reset();
    return true;
}

// Called when a user's call may change an env between two episodes. If episodes are logged, the call must precede the next reset: an
// early reset is repeated after it.
void Loop::restart_early_reset(std::uint32_t local) {
    ServedEnv& served = envs_.at(local);
    if (served.is_early && pool_->own.hashing.load(std::memory_order_relaxed) != 0) discard_early_reset(served);
}

void Loop::restore(std::uint32_t local, nb::dict position) {
    ServedEnv& served = envs_.at(local);
    discard_early_reset(served);
    const auto sums = nb::cast<nb::bytes>(position["sums"]), outcome = nb::cast<nb::bytes>(position["outcome"]), alive = nb::cast<nb::bytes>(position["was_alive"]);
    const std::size_t returns = served.episode_return.size() * sizeof(double), lengths = served.episode_length.size() * sizeof(std::int64_t);
    if (sums.size() != returns + lengths || outcome.size() < batch_size_) throw std::invalid_argument("the position is of another env");
    served.seeds = {nb::cast<std::uint64_t>(position["base_seed"]), nb::cast<std::uint64_t>(position["env_episode"]), nb::cast<bool>(position["has_seed"])};
    std::memcpy(served.episode_return.data(), sums.data(), returns);
    std::memcpy(served.episode_length.data(), static_cast<const char*>(sums.data()) + returns, lengths);
    const char* over = static_cast<const char*>(outcome.data()) + outcome.size() - batch_size_;
    const std::size_t num_rewards = served.episode_return.size() / batch_size_;
    for (std::uint32_t k = 0; k < batch_size_; ++k) {
        if (over[k] == 0) continue;
        std::fill_n(served.episode_return.begin() + static_cast<std::ptrdiff_t>(k * num_rewards), num_rewards, 0.0);
        served.episode_length[k] = 0;
    }
    if (is_batched_) served.ended.assign(over, over + batch_size_);
    served.needs_reset = !is_batched_ && over[0] != 0 && autoreset_ == Autoreset::NEXT_STEP;
    if (alive.size() == served.alive.size() && !served.alive.empty()) std::memcpy(served.alive.data(), alive.data(), alive.size());
}

// Sets the options of resets without options of their own. An early reset that used others is repeated.
void Loop::set_default_options(std::uint32_t local, nb::handle options) {
    ServedEnv& served = envs_.at(local);
    served.has_options = !options.is_none();
    served.options.clear();
    if (served.is_early) discard_early_reset(served);
    if (!served.has_options) return;
    const auto* data = reinterpret_cast<const std::uint8_t*>(PyBytes_AsString(options.ptr()));
    if (data == nullptr) throw nb::python_error();
    served.options.assign(data, data + PyBytes_GET_SIZE(options.ptr()));
}

nb::object Loop::default_options(const ServedEnv& served) const { return nb::steal(decode(served.options.data(), served.options.size(), {unpickler_.ptr(), nullptr})); }

void Loop::discard_early_reset(ServedEnv& served) const {
    if (served.seeds.has_seed && seeding_ != Seeding::CONTINUE) --served.seeds.episode;  // the episode was not used
    served.is_early = false;
    served.early_obs.reset(), served.early_info.reset(), served.early_error.reset();
}

}  // namespace stepmill
