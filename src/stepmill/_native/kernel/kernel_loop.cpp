#define NO_IMPORT_ARRAY
#include "kernel/kernel_loop.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <system_error>

#include <unistd.h>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "codec/blobs.hpp"
#include "shared/native_thread.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t GIL_NS = 5'000;          // shorter work is done with the GIL
constexpr std::uint64_t SLICE_NS = 100'000'000;  // a wait checks for signals this often

// Encodes an empty info, and the last info of an episode: zeros, which threads overwrite. The codec writes the items of an array or
// NumPy scalar last, so those of an info end where an encoded dict of the infos up to it ends.
void write_final_payload(KernelPlan& plan, nb::handle infos, Encoder& encoder) {
    nb::dict last;
    if (!encoder.encode(last.ptr(), plan.final_payload)) throw nb::python_error();
    const std::size_t start = plan.final_payload.size();
    std::vector<std::uint8_t> encoded;
    for (nb::handle info : infos) {
        last[info[0]] = info[1];
        encoded.clear();
        if (!encoder.encode(last.ptr(), encoded)) throw nb::python_error();
        plan.final_offsets.push_back(start + encoded.size() - nb::cast<std::size_t>(info[1].attr("nbytes")));
    }
    if (!encoder.encode(last.ptr(), plan.final_payload)) throw nb::python_error();
}

KernelPlan parse_plan(nb::dict settings, Encoder& encoder) {
    auto pointer = [&](const char* name) { return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(settings[name])); };
    KernelPlan plan;
    plan.call = static_cast<KernelCall>(nb::cast<int>(settings["call"]));
    plan.reset = pointer("reset");
    plan.step = pointer("step");
    plan.state_bytes = nb::cast<std::size_t>(settings["state_bytes"]);
    plan.saved_bytes = nb::cast<std::size_t>(settings["saved_bytes"]);
    plan.max_episode_steps = nb::cast<std::int64_t>(settings["max_episode_steps"]);
    plan.obs_offsets = nb::cast<std::vector<std::size_t>>(settings["obs_offsets"]);
    plan.action_offsets = nb::cast<std::vector<std::size_t>>(settings["action_offsets"]);
    plan.obs_bytes = nb::cast<std::size_t>(settings["obs_bytes"]);
    plan.action_bytes = nb::cast<std::size_t>(settings["action_bytes"]);
    plan.autoreset = static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]));
    plan.seeding = static_cast<Seeding>(nb::cast<int>(settings["seeding"]));
    plan.entropy = nb::cast<std::uint64_t>(settings["entropy"]);
    plan.info_bytes = nb::cast<std::size_t>(settings["info_bytes"]);
    plan.info_offsets = nb::cast<std::vector<std::size_t>>(settings["info_offsets"]);
    write_final_payload(plan, settings["infos"], encoder);
    return plan;
}

// A message that fills its buffer may end within a letter, which is left out.
nb::object decode_message(const std::string& message) {
    Py_ssize_t num_used = 0;
    return checked(PyUnicode_DecodeUTF8Stateful(message.data(), static_cast<Py_ssize_t>(message.size()), "replace", &num_used));
}

}  // namespace

KernelLoop::KernelLoop(std::shared_ptr<Slab> slab, nb::dict settings)
    : slab_(std::move(slab)),
      words_(slab_->words.at(0)),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      payloads_(*slab_, 0),
      always_releases_gil_(nb::cast<bool>(settings["always_releases_gil"])) {
    slab_->check();
    const auto num_runners = nb::cast<std::uint32_t>(settings["num_threads"]);
    envs_ = std::make_shared<KernelEnvs>(slab_, parse_plan(settings, encoder_), num_runners);
    KernelThreadsPlan plan;
    plan.num_envs = envs_->num_envs();
    plan.num_threads = num_runners - 1;
    plan.cores = nb::cast<std::vector<int>>(settings["cores"]);
    plan.spin_ns = slab_->pool->own.spin_ns.load(std::memory_order_relaxed);
    threads_ = std::make_unique<KernelThreads>(envs_, std::move(plan));
    for (std::uint32_t local = 0; local < envs_->num_envs(); ++local) queued_tickets_.push_back(words_.done[local].load(std::memory_order_acquire));
    new_envs_.reserve(queued_tickets_.size());
    const auto limit_ns = nb::cast<std::uint64_t>(settings["step_timeout_ns"]);
    if (limit_ns != 0) watch_ = std::make_unique<KernelWatch>(envs_, nb::cast<std::string>(settings["name"]), limit_ns);
}

void KernelLoop::release() { describe_.reset(), unpickler_.reset(), outside_ = nb::list(); }

int KernelLoop::traverse(visitproc visit, void* arg) const {
    Py_VISIT(describe_.ptr());
    Py_VISIT(outside_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

// ---- running ----------------------------------------------------------------------------------------------------

bool KernelLoop::advance(bool is_waiting) {
    const bool has_begun = begin();
    if (is_waiting && threads_->has_work()) run_or_wait();
    if (envs_->has_faults()) publish_faults(envs_->pop_faults());
    const std::uint32_t finished = threads_->num_finished();
    return std::exchange(num_seen_, finished) != finished || has_begun || threads_->has_work();
}

// Queues the envs that have new commands. Work that takes less time than waking a thread is done at once, in this thread.
bool KernelLoop::begin() {
    new_envs_.clear();
    for (std::uint32_t local = 0; local < queued_tickets_.size(); ++local) {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        if (ticket == queued_tickets_[local]) continue;
        queued_tickets_[local] = ticket;
        if ((words_.flags[local] & FLAG_BLOB) && refuses_options(local)) continue;
        new_envs_.push_back(local);
    }
    if (new_envs_.empty()) return false;
    threads_->push(new_envs_);
    if (threads_->queued_ns() <= KernelThreads::HANDOVER_NS) {
        WithoutGil without_gil(*this, always_releases_gil_);
        while (threads_->run_chunk() != 0) {
        }
    } else if (threads_->num_threads() != 0) {
        threads_->wake();
    }
    return true;
}

bool KernelLoop::step_all(std::uint32_t slot) {
    const std::uint64_t needed_ns = threads_->needed_ns(envs_->num_envs());
    envs_->begin_whole(slot);
    threads_->push_all(envs_->num_envs());
    WithoutGil without_gil(*this, needed_ns > GIL_NS);
    if (needed_ns > KernelThreads::HANDOVER_NS && threads_->num_threads() != 0) threads_->wake();
    while (threads_->has_work()) {
        const std::uint32_t seen = threads_->num_finished();
        if (threads_->run_chunk() == 0 && threads_->has_work()) threads_->wait_finished(seen, SLICE_NS);
    }
    without_gil.end();
    num_seen_ = threads_->num_finished();
    return !envs_->has_faults();
}

// Called when the commands of a step that is done have been written.
void KernelLoop::finish_all() {
    for (std::uint32_t local = 0; local < queued_tickets_.size(); ++local) queued_tickets_[local] = words_.ticket[local].load(std::memory_order_acquire);
    std::vector<bool> has_fault(queued_tickets_.size());
    const std::vector<KernelFault> faults = envs_->pop_faults();
    for (const KernelFault& fault : faults) has_fault[fault.local] = true;
    publish_faults(faults);
    for (std::uint32_t local = 0; local < queued_tickets_.size(); ++local) {
        if (!has_fault[local]) words_.done[local].store(queued_tickets_[local], std::memory_order_release);
    }
}

// Kernels take no reset options and no large seeds. Returns whether the command has either, and is now done with a fault.
bool KernelLoop::refuses_options(std::uint32_t local) {
    if (!read_blob_bytes(*slab_, slab_->plan.servers[0][local], buffer_)) throw std::runtime_error("a reset's options could not be read back");
    const nb::object blob = checked(decode(buffer_.data(), buffer_.size(), {unpickler_.ptr(), nullptr}));
    const nb::object seed = blob[0], options = blob[1];
    const char* text = nullptr;
    if (!seed.is_none()) text = "seeds of kernels have 64 bits; give a smaller one";
    if (!options.is_none() && nb::len(options) != 0) text = "kernels take no reset options; declare a method, and call it";
    if (text == nullptr) return false;
    publish_fault(local, describe_(true, -1, 0, nb::str(text)));
    return true;
}

// Runs queued envs for at most MOMENT_NS. If the queue is empty, other threads still run envs: waits for one of them.
void KernelLoop::run_or_wait() {
    constexpr std::uint64_t MOMENT_NS = 50'000;
    const bool is_short = threads_->queued_ns() <= GIL_NS && threads_->num_queued() != 0;
    WithoutGil without_gil(*this, !is_short || always_releases_gil_);
    const std::uint32_t seen = threads_->num_finished();
    const std::uint64_t until = now_ns() + MOMENT_NS;
    while (threads_->run_chunk() != 0 && now_ns() < until) {
    }
    // If all envs take about the same time, the envs of the other threads are nearly done.
    if (threads_->num_queued() == 0 && threads_->has_work()) {
        const std::uint32_t now = threads_->num_finished();
        threads_->wait_finished(now, now == seen ? SLICE_NS : KernelThreads::CHUNK_NS);
    }
    without_gil.end();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Before a call of an env: runs the commands that were given before the call.
void KernelLoop::run_until(std::uint32_t local, std::uint32_t after_ticket) {
    auto is_outstanding = [&] {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        return words_.done[local].load(std::memory_order_acquire) != ticket && !is_later(ticket, after_ticket);
    };
    while (is_outstanding() && advance(true)) {
    }
}

bool KernelLoop::stop(double timeout_s) {
    const nb::gil_scoped_release no_gil;
    const std::uint64_t until = now_ns() + to_ns(timeout_s);
    is_stopping_.store(true, std::memory_order_seq_cst);
    const bool have_ended = threads_->stop(to_ns(timeout_s));
    return wait_until_zero(is_in_envs_, until - std::min(until, now_ns()), SLICE_NS) && have_ended;
}

nb::object KernelLoop::last_reported() const {
    const std::uint32_t env_id = watch_ ? watch_->last_reported() : NO_SERVER;
    return env_id == NO_SERVER ? nb::none() : nb::object(nb::int_(env_id));
}

// ---- faults -----------------------------------------------------------------------------------------------------

void KernelLoop::publish_faults(const std::vector<KernelFault>& faults) {
    for (const KernelFault& fault : faults) {
        nb::object record = nb::none();
        try {
            record = describe_(fault.is_reset, fault.status, reinterpret_cast<std::uintptr_t>(fault.raised), decode_message(fault.message));
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("the fault of a kernel");  // the fault is published without a text
        }
        publish_fault(fault.local, record);
    }
}

void KernelLoop::publish_fault(std::uint32_t local, nb::handle record) {
    words_.result[local] = 0;
    words_.payload_bytes[local] = 0;
    envs_->mark_faulted(local);
    buffer_.clear();
    if (!encoder_.encode(record.ptr(), buffer_) || !payloads_.write(local, buffer_)) PyErr_Clear();  // the fault has no text then
    words_.fault[local].store(static_cast<std::uint32_t>(Fault::RAISED), std::memory_order_relaxed);
    words_.done[local].store(queued_tickets_[local], std::memory_order_release);
}

// ---- an env's memory --------------------------------------------------------------------------------------------

nb::object KernelLoop::state_of(std::uint32_t local) {
    if (local >= queued_tickets_.size()) throw std::out_of_range("no such env");
    auto size = static_cast<npy_intp>(envs_->state_bytes());
    nb::object array = checked(PyArray_SimpleNewFromData(1, &size, NPY_UINT8, envs_->state(local)));
    const nb::object owner = nb::find(this);
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.inc_ref().ptr()) != 0) throw nb::python_error();
    return array;
}

void KernelLoop::set_outside(nb::list outside) {
    outside_ = std::move(outside);
    outside_memory_.clear();
    for (nb::handle each : outside_) outside_memory_.push_back(each.is_none() ? OutsideMemory() : nb::cast<OutsideMemory>(each.attr("describe")()));
}

nb::tuple KernelLoop::save(std::uint32_t local) {
    const nb::object bytes = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(envs_->saved_bytes())));
    envs_->save(local, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr())));
    const nb::object outside = outside_[local];
    if (outside.is_none()) return nb::make_tuple(bytes, outside);
    outside.attr("check")();
    const auto& [save, load, first, second, kind, size, spans] = outside_memory_[local];
    const nb::object saved = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* next = PyBytes_AS_STRING(saved.ptr());
    for (const auto& [address, num] : spans) std::memcpy(next, reinterpret_cast<const void*>(address), num), next += num;
    reinterpret_cast<OutsideFunction>(save)(first, second, next, kind);
    return nb::make_tuple(bytes, saved);
}

void KernelLoop::check_saved(const nb::object& saved) const {
    const nb::object bytes = saved[0], outside = saved[1], own = outside_[0];
    const auto has_size = [](const nb::object& value, std::size_t size) { return PyBytes_Check(value.ptr()) && nb::len(value) == size; };
    const bool has_outside = own.is_none() ? outside.is_none() : has_size(outside, std::get<5>(outside_memory_[0]));
    if (!has_size(bytes, envs_->saved_bytes()) || !has_outside) throw std::invalid_argument("the size of its memory is wrong");
}

void KernelLoop::restore(std::uint32_t local, const nb::object& saved) {
    envs_->restore(local, reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(PyTuple_GET_ITEM(saved.ptr(), 0))));
    const auto& [save, load, first, second, kind, size, spans] = outside_memory_[local];
    if (load == 0) return;
    char* next = PyBytes_AS_STRING(PyTuple_GET_ITEM(saved.ptr(), 1));
    for (const auto& [address, num] : spans) std::memcpy(reinterpret_cast<void*>(address), next, num), next += num;
    reinterpret_cast<OutsideFunction>(load)(first, second, next, kind);
}

// ---- watching ----------------------------------------------------------------------------------------------------

KernelWatch::KernelWatch(std::shared_ptr<const KernelEnvs> envs, std::string name, std::uint64_t limit_ns)
    : envs_(std::move(envs)), name_(std::move(name)), limit_ns_(limit_ns), seen_(envs_->progress().size()), pid_(getpid()) {
    if (const int error = start_native_thread(thread_, run_thread, this); error != 0) throw std::system_error(error, std::generic_category(), "a thread for kernels cannot be started");
}

KernelWatch::~KernelWatch() {
    if (getpid() != pid_) return;  // a forked child has no such thread
    is_ended_.store(1, std::memory_order_seq_cst);
    futex_wake_all(is_ended_);
    pthread_join(thread_, nullptr);
}

void* KernelWatch::run_thread(void* watch) {
    static_cast<KernelWatch*>(watch)->run();
    return nullptr;
}

void KernelWatch::run() noexcept {
    while (is_ended_.load(std::memory_order_seq_cst) == 0) {
        futex_wait(is_ended_, 0, limit_ns_ / 4 + 1);
        const std::uint64_t now = now_ns();
        for (std::size_t thread = 0; thread < seen_.size(); ++thread) check(envs_->progress()[thread], seen_[thread], now);
    }
}

void KernelWatch::check(const KernelProgress& progress, Seen& seen, std::uint64_t now) noexcept {
    const std::uint32_t env = progress.env.load(std::memory_order_relaxed), num_begun = progress.num_begun.load(std::memory_order_relaxed);
    if (env == NO_SERVER || env != seen.env || num_begun != seen.num_begun) {
        seen = {env, num_begun, now, false};
        return;
    }
    if (seen.is_reported || now - seen.since_ns < limit_ns_) return;
    seen.is_reported = true;
    const std::uint32_t env_id = envs_->env_id(env);
    last_reported_.store(env_id, std::memory_order_relaxed);
    std::fprintf(stderr, "stepmill: env %u of the kernel %s has not returned for %.3g s (step_timeout_s), and compiled code cannot be ended; run it as Python to find out where it hangs\n", env_id, name_.c_str(), static_cast<double>(now - seen.since_ns) / 1e9);
}

}  // namespace stepmill
