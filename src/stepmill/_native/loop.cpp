#define NO_IMPORT_ARRAY
#include <unistd.h>

#include <algorithm>

#include "forks.hpp"
#include "loop.hpp"

namespace stepmill {

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
      has_overlap_(settings.contains("overlap") && nb::cast<bool>(settings["overlap"]) && autoreset_ == Autoreset::NEXT_STEP && !is_batched_),
      is_inline_(nb::cast<bool>(settings.contains("inline") ? nb::object(settings["inline"]) : nb::object(nb::bool_(false)))),
      reset_retries_(nb::cast<std::uint32_t>(settings["reset_retries"])),
      retry_wait_ns_(nb::cast<std::uint64_t>(settings["retry_wait_ns"])),
      batch_size_(slab_->plan.batch_size),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation)),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      info_(Tree::parse(settings["info"], settings["info_leaves"], slab_->plan.info)),
      reward_(parse_leaf(settings["reward"], slab_->plan.outcome.reward)),
      is_plain_(slab_->plan.outcome.is_plain()),
      final_columns_(slab_->plan.final_observation),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      overflow_(slab_->result_fds.at(worker), slab_->plan.servers.at(worker).size()),
      fork_generation_(watch_forks()),
      reset_names_(nb::make_tuple("seed", "options")),
      seed_name_(nb::make_tuple("seed")),
      no_info_(nb::dict()) {
    slab_->check();
    reward_.path = "reward";
    for (Leaf& leaf : info_.leaves) leaf.path = "info" + leaf.path;
    const nb::object time_step = settings.contains("time_step") ? nb::object(settings["time_step"]) : nb::none();
    if (!time_step.is_none()) {
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
        served.step = served.env.attr("step");
        served.reset = served.env.attr("reset");
    }
}

void Loop::release() {
    envs_.clear();
    describe_.reset(), unpickler_.reset();
    interned_.fill(nb::object());
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
        // The bell is read before the tickets: what comes after this line rings it again.
        const std::uint32_t seen = control_->bell.load(std::memory_order_acquire);
        if (control_->stop.load(std::memory_order_acquire) != 0 || is_given_up()) return LoopExit::STOP;
        bool is_interrupted = false;
        const bool has_worked = sweep(is_interrupted);
        if (is_interrupted || control_->requests.load(std::memory_order_acquire) != requests_seen_) {
            control_->serving.store(1, std::memory_order_release);
            return LoopExit::REQUEST;
        }
        const bool is_patient = has_worked && ++passed_ < MAX_PASSED;
        const bool has_staged = !is_patient && do_staged();
        if (!has_worked && !has_staged && !(has_overlap_ && reset_early())) wait(seen);
        if (PyErr_Occurred()) throw nb::python_error();
    }
}

// Does every command that is there, in server order. Stops before a command that a slow request might have to precede.
bool Loop::sweep(bool& is_interrupted) {
    bool has_worked = false;
    std::uint64_t began = 0;
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        if (ticket == envs_[local].done || is_staged(local)) continue;
        if (control_->requests.load(std::memory_order_acquire) != requests_seen_) {
            is_interrupted = true;
            break;
        }
        if (!has_worked) began = now_ns();
        has_worked = true;
        do_command(local, ticket);
    }
    if (!has_worked) return false;
    flush();
    const std::uint64_t spent = now_ns() - began;
    control_->env_ns.store(control_->env_ns.load(std::memory_order_relaxed) + spent, std::memory_order_relaxed);
    return true;
}

// One reset whose result is to wait in a staging row: whoever waits for a command's result comes first. False if there is none.
bool Loop::do_staged() {
    passed_ = 0;
    if (slab_->plan.staging.empty()) return false;
    for (std::uint32_t local = 0; local < envs_.size(); ++local) {
        const bool is_waiting = words_.ticket[local].load(std::memory_order_acquire) != envs_[local].done && is_staged(local);
        if (!is_waiting) continue;
        return control_->requests.load(std::memory_order_acquire) == requests_seen_ && run_server(local);
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
    do_command(local, ticket);
    flush();
    control_->env_ns.store(control_->env_ns.load(std::memory_order_relaxed) + now_ns() - began, std::memory_order_relaxed);
    return true;
}

// Hot path. A thread that closes the pool meanwhile waits in wait_idle() for the end of the command.
void Loop::run_inline(std::uint32_t local, std::uint32_t ticket) {
    struct Runner {
        explicit Runner(Loop& of) : loop(of) {
            loop.is_running_.store(1, std::memory_order_relaxed);
            loop.runner_.store(PyThread_get_thread_ident(), std::memory_order_relaxed);
        }
        ~Runner() {
            loop.runner_.store(0, std::memory_order_relaxed);
            loop.is_running_.store(0, std::memory_order_release);
            if (loop.control_->stop.load(std::memory_order_relaxed) != 0) futex_wake_all(loop.is_running_);
        }
        Loop& loop;
    };
    const Runner runner(*this);
    // Whoever closes the pool sets `stop` and looks for a runner: one of the two sees the other, since both hold the GIL.
    if (control_->stop.load(std::memory_order_relaxed) == 0) do_command(local, ticket);
}

bool Loop::wait_idle(double timeout_s) {
    constexpr std::uint64_t SLICE_NS = 10'000'000;  // `stop` may be seen too late by a runner that ends just now, which then wakes nobody
    const std::uint64_t until = now_ns() + static_cast<std::uint64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
    if (runner_.load(std::memory_order_relaxed) == PyThread_get_thread_ident()) return true;
    const nb::gil_scoped_release no_gil;
    while (is_running_.load(std::memory_order_acquire) != 0) {
        const std::uint64_t now = now_ns();
        if (now >= until) return false;
        futex_wait(is_running_, 1, std::min(SLICE_NS, until - now));
    }
    return true;
}

void Loop::run_until(std::uint32_t local, std::uint32_t after_ticket) {
    const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
    if (ticket != envs_[local].done && static_cast<std::int32_t>(after_ticket - ticket) >= 0) run_server(local);
}

void Loop::do_command(std::uint32_t local, std::uint32_t ticket) {
    ServedEnv& served = envs_[local];
    if (!is_inline_ && !take_command(words_.state[local], ticket)) {
        served.done = ticket;  // condemned before it began
        return;
    }
    begin_activity(*control_, local, static_cast<Activity>(get_command(words_, local)));
    Result result;
    const char* phase = "step";
    if (perform(local, result, phase)) {
        publish(local, ticket, result);
    } else {
        const bool is_output = phase[0] == 'o';  // "output of …": the env returned, but not what an env returns
        publish_fault(local, ticket, is_output ? Fault::BAD_OUTPUT : Fault::RAISED, phase, false);
    }
    served.done = ticket;
    end_activity(*control_);
}

// A thread that was given up, and comes back from whatever it hung in, makes room for its successor. A process seldom lives to see it.
// The successor begins while `dead` says DIED of the one before it.
bool Loop::is_given_up() const { return control_->dead.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Death::OVERDUE); }

// An env forked, and the copy came back from it, as it does where an exception or sys.exit() ends what it had to do: it must not
// answer commands beside the process whose copy it is.
void Loop::end_if_copied() {
    if (is_inline_ || fork_generation_ == fork_count.load(std::memory_order_relaxed)) return;
    int status = EXIT_STRAY_COPY;
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_SystemExit)) {
        const nb::object error = nb::steal(raised_exception());
        const nb::object code = nb::getattr(error, "code", nb::none());
        status = code.is_none() ? 0 : PyLong_Check(code.ptr()) ? static_cast<int>(PyLong_AsLong(code.ptr())) : 1;
    } else {
        if (PyErr_Occurred()) PyErr_PrintEx(0);
        PySys_WriteStderr("stepmill: a process that an env forked came back from step() or reset(), and is ended here; it should end itself, by os._exit()\n");
    }
    _exit(status);
}

// ---- waiting ----------------------------------------------------------------------------------------------------

void Loop::wait(std::uint32_t seen) {
    PyThreadState* thread = PyEval_SaveThread();
    const std::uint64_t waited_ns = sleep_on_bell(*pool_, *control_, worker_, seen, patience_);
    control_->wait_ns.store(control_->wait_ns.load(std::memory_order_relaxed) + waited_ns, std::memory_order_relaxed);
    PyEval_RestoreThread(thread);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace stepmill
