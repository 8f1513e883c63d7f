#define NO_IMPORT_ARRAY
#include "kernel_loop.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "blobs.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t GIL_NS = 5'000;          // work of less than that is done with the GIL
constexpr std::uint64_t SLICE_NS = 100'000'000;  // how often a wait looks for signals

KernelPlan parse_plan(nb::dict settings, Encoder& encoder) {
    auto pointer = [&](const char* name) { return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(settings[name])); };
    KernelPlan plan;
    plan.call = static_cast<KernelCall>(nb::cast<int>(settings["call"]));
    plan.reset = pointer("reset");
    plan.step = pointer("step");
    plan.state_bytes = nb::cast<std::size_t>(settings["state_bytes"]);
    plan.max_episode_steps = nb::cast<std::int64_t>(settings["max_episode_steps"]);
    plan.obs_offsets = nb::cast<std::vector<std::size_t>>(settings["obs_offsets"]);
    plan.action_offsets = nb::cast<std::vector<std::size_t>>(settings["action_offsets"]);
    plan.obs_bytes = nb::cast<std::size_t>(settings["obs_bytes"]);
    plan.action_bytes = nb::cast<std::size_t>(settings["action_bytes"]);
    plan.autoreset = static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]));
    plan.seeding = static_cast<Seeding>(nb::cast<int>(settings["seeding"]));
    plan.entropy = nb::cast<std::uint64_t>(settings["entropy"]);
    const nb::dict no_info;
    if (!encoder.encode(no_info.ptr(), plan.no_infos) || !encoder.encode(no_info.ptr(), plan.no_infos)) throw nb::python_error();
    return plan;
}

}  // namespace

KernelLoop::KernelLoop(std::shared_ptr<Slab> slab, nb::dict settings)
    : slab_(std::move(slab)),
      words_(slab_->words.at(0)),
      describe_(settings["describe"]),
      unpickler_(settings["unpickler"]),
      encoder_(nb::object(settings["pickler"]).ptr()),
      overflow_(slab_->result_fds.at(0), slab_->plan.servers.at(0).size()) {
    slab_->check();
    const auto num_runners = nb::cast<std::uint32_t>(settings["num_threads"]);
    envs_ = std::make_shared<KernelEnvs>(slab_, parse_plan(settings, encoder_), num_runners);
    KernelThreadsPlan plan;
    plan.num_envs = envs_->num_envs();
    plan.num_threads = num_runners - 1;
    plan.cores = nb::cast<std::vector<int>>(settings["cores"]);
    plan.spin_ns = slab_->pool->spin_ns.load(std::memory_order_relaxed);
    threads_ = std::make_unique<KernelThreads>(envs_, std::move(plan));
    for (std::uint32_t local = 0; local < envs_->num_envs(); ++local) taken_.push_back(words_.done[local].load(std::memory_order_acquire));
    fresh_.reserve(taken_.size());
    const auto limit_ns = nb::cast<std::uint64_t>(settings["step_timeout_ns"]);
    if (limit_ns != 0) watch_ = std::make_unique<KernelWatch>(envs_, nb::cast<std::string>(settings["name"]), limit_ns);
}

void KernelLoop::release() { describe_.reset(), unpickler_.reset(); }

int KernelLoop::traverse(visitproc visit, void* arg) const {
    Py_VISIT(describe_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

// ---- running ----------------------------------------------------------------------------------------------------

bool KernelLoop::help(bool is_waiting) {
    const bool has_begun = begin();
    if (is_waiting && threads_->has_work()) run_or_wait();
    if (envs_->has_faults()) publish_faults(envs_->take_faults());
    const std::uint32_t finished = threads_->num_finished();
    return std::exchange(num_seen_, finished) != finished || has_begun || threads_->has_work();
}

// Queues what was commanded. Work that takes less time than a wake-up is done at once: nobody else is asked for it.
bool KernelLoop::begin() {
    fresh_.clear();
    for (std::uint32_t local = 0; local < taken_.size(); ++local) {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        if (ticket == taken_[local]) continue;
        taken_[local] = ticket;
        if ((words_.flags[local] & FLAG_BLOB) && refuses_options(local)) continue;
        fresh_.push_back(local);
    }
    if (fresh_.empty()) return false;
    threads_->push(fresh_);
    if (threads_->queued_ns() <= KernelThreads::HANDOVER_NS) {
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

// The commands were written after they were done.
void KernelLoop::finish_all() {
    for (std::uint32_t local = 0; local < taken_.size(); ++local) taken_[local] = words_.ticket[local].load(std::memory_order_acquire);
    std::vector<bool> has_fault(taken_.size());
    const std::vector<KernelFault> faults = envs_->take_faults();
    for (const KernelFault& fault : faults) has_fault[fault.local] = true;
    publish_faults(faults);
    for (std::uint32_t local = 0; local < taken_.size(); ++local) {
        if (!has_fault[local]) words_.done[local].store(taken_[local], std::memory_order_release);
    }
}

// A kernel's reset has a seed and no options. Whether the command is answered with a fault.
bool KernelLoop::refuses_options(std::uint32_t local) {
    if (!read_blob_bytes(*slab_, 0, local, buffer_)) throw std::runtime_error("a reset's options could not be read back");
    const nb::object blob = nb::steal(decode(buffer_.data(), buffer_.size(), {unpickler_.ptr(), nullptr}));
    if (!blob) throw nb::python_error();
    const nb::object seed = blob[0], options = blob[1];
    const char* text = nullptr;
    if (!seed.is_none()) text = "seeds of kernels have 64 bits; give a smaller one";
    if (!options.is_none() && nb::len(options) != 0) text = "kernels take no reset options; declare a method, and call it";
    if (text == nullptr) return false;
    publish_fault(local, describe_(true, -1, 0, nb::str(text)));
    return true;
}

// Runs what is queued, for a moment. Where nothing is left to take the other threads are at work: one of them is waited for.
void KernelLoop::run_or_wait() {
    constexpr std::uint64_t MOMENT_NS = 50'000;
    const bool is_short = threads_->queued_ns() <= GIL_NS && threads_->num_queued() != 0;
    WithoutGil without_gil(*this, !is_short);
    const std::uint32_t seen = threads_->num_finished();
    const std::uint64_t until = now_ns() + MOMENT_NS;
    while (threads_->run_chunk() != 0 && now_ns() < until) {
    }
    // Those that were taken by others are nearly done, where all have about as much to do.
    if (threads_->num_queued() == 0 && threads_->has_work()) {
        const std::uint32_t now = threads_->num_finished();
        threads_->wait_finished(now, now == seen ? SLICE_NS : KernelThreads::CHUNK_NS);
    }
    without_gil.end();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// For a call to an env, which comes after the commands that were given before it.
void KernelLoop::run_until(std::uint32_t local, std::uint32_t after_ticket) {
    auto is_outstanding = [&] {
        const std::uint32_t ticket = words_.ticket[local].load(std::memory_order_acquire);
        return words_.done[local].load(std::memory_order_acquire) != ticket && static_cast<std::int32_t>(after_ticket - ticket) >= 0;
    };
    while (is_outstanding() && help(true)) {
    }
}

bool KernelLoop::stop(double timeout_s) {
    const nb::gil_scoped_release no_gil;
    const auto timeout_ns = static_cast<std::uint64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
    const std::uint64_t until = now_ns() + timeout_ns;
    is_stopping_.store(true, std::memory_order_seq_cst);
    const bool have_ended = threads_->stop(timeout_ns);
    while (is_in_envs_.load(std::memory_order_seq_cst) != 0) {
        const std::uint64_t now = now_ns();
        if (now >= until) return false;
        futex_wait(is_in_envs_, 1, std::min(SLICE_NS, until - now));
    }
    return have_ended;
}

// ---- faults -----------------------------------------------------------------------------------------------------

void KernelLoop::publish_faults(const std::vector<KernelFault>& faults) {
    for (const KernelFault& fault : faults) {
        nb::object record = nb::none();
        try {
            record = describe_(fault.is_reset, fault.status, reinterpret_cast<std::uintptr_t>(fault.raised), nb::str(fault.message.c_str(), fault.message.size()));
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("the fault of a kernel");  // a fault without its words is still one
        }
        publish_fault(fault.local, record);
    }
}

void KernelLoop::publish_fault(std::uint32_t local, nb::handle record) {
    words_.result[local] = 0;
    words_.payload_bytes[local] = 0;
    envs_->note_fault(local);
    buffer_.clear();
    OverflowRef ref;
    if (!encoder_.encode(record.ptr(), buffer_)) {
        PyErr_Clear();
    } else if (buffer_.size() <= slab_->plan.payload.row_bytes) {
        std::memcpy(slab_->payload(words_.row[local]), buffer_.data(), buffer_.size());
        words_.payload_bytes[local] = buffer_.size();
    } else if (overflow_.write(local, buffer_.data(), buffer_.size(), ref) == 0) {
        words_.payload_offset[local] = ref.offset, words_.payload_generation[local] = ref.generation;
        words_.result[local] = RESULT_REMOTE;
        words_.payload_bytes[local] = buffer_.size();
    }
    words_.fault[local].store(static_cast<std::uint32_t>(Fault::RAISED), std::memory_order_relaxed);
    words_.done[local].store(taken_[local], std::memory_order_release);
}

// ---- an env's memory --------------------------------------------------------------------------------------------

nb::object KernelLoop::state_of(std::uint32_t local) {
    if (local >= taken_.size()) throw std::out_of_range("no such env");
    auto size = static_cast<npy_intp>(envs_->state_bytes());
    nb::object array = nb::steal(PyArray_SimpleNewFromData(1, &size, NPY_UINT8, envs_->state(local)));
    if (!array) throw nb::python_error();
    const nb::object owner = nb::find(this);
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.inc_ref().ptr()) != 0) throw nb::python_error();
    return array;
}

nb::bytes KernelLoop::snapshot(std::uint32_t local) {
    if (local >= taken_.size()) throw std::out_of_range("no such env");
    std::vector<std::byte> bytes(envs_->snapshot_bytes());
    envs_->write_snapshot(local, bytes.data());
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void KernelLoop::restore(std::uint32_t local, nb::bytes bytes) {
    if (local >= taken_.size()) throw std::out_of_range("no such env");
    if (bytes.size() != envs_->snapshot_bytes()) throw std::invalid_argument("the snapshot is of another kernel");
    envs_->read_snapshot(local, reinterpret_cast<const std::byte*>(bytes.c_str()));
}

}  // namespace stepmill
