#define NO_IMPORT_ARRAY
#include "ledger.hpp"

#include <algorithm>
#include <cstring>
#include <pthread.h>

#include "reaper.hpp"

namespace stepmill {

namespace {

std::atomic<std::uint32_t> fork_count{0};

std::uint32_t watch_forks() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
    static_cast<void>(once);
    return fork_count.load();
}

std::string list_ids(const std::vector<std::uint32_t>& ids) {
    std::string text = "[";
    for (std::size_t i = 0; i < ids.size() && i < 16; ++i) text += (i ? ", " : "") + std::to_string(ids[i]);
    return text + (ids.size() > 16 ? ", …]" : "]");
}

[[noreturn]] void raise_busy(const std::vector<std::uint32_t>& busy) {
    const std::string text = "envs " + list_ids(busy) + " are still stepping or not received; receive them, or reset them, before they are commanded again";
    nb::list ids;
    for (const std::uint32_t id : busy) ids.append(id);
    const nb::object error = errors().busy(text, nb::arg("env_ids") = ids);
    PyErr_SetObject(errors().busy.ptr(), error.ptr());
    throw nb::python_error();
}

}  // namespace

InUse::InUse(Ledger& ledger) : ledger_(ledger) {
    if (ledger.fork_generation_ != fork_count.load(std::memory_order_relaxed)) {
        raise(errors().usage, "this pool belongs to the process that made it; make a new pool in the forked child");
    }
    if (ledger.is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool is closed; make a new one");
    if (ledger.is_in_use_.exchange(true, std::memory_order_acquire)) {
        raise(errors().usage, "the pool is in use by another call; a pool is used by one thread at a time, and not from within its own envs or signal handlers");
    }
}

InUse::~InUse() {
    ledger_.is_in_use_.store(false, std::memory_order_release);
    if (ledger_.is_released_) ledger_.let_go();
}

void raise(const nb::object& error, const std::string& text) {
    PyErr_SetString(error.ptr(), text.c_str());
    throw nb::python_error();
}

Errors& errors() {
    static Errors* const classes = new Errors;  // lives as long as the interpreter: errors are raised until the very end
    return *classes;
}

Ledger::Ledger(std::shared_ptr<Slab> slab, nb::dict settings)
    : slab_(std::move(slab)),
      book_(std::make_shared<SlotBook>(slab_->memory, slab_->plan.num_slots)),
      num_envs_(nb::cast<std::uint32_t>(settings["num_envs"])),
      batch_size_(slab_->plan.batch_size),
      num_workers_(static_cast<std::uint32_t>(slab_->workers.size())),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation)),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      is_touched_(num_workers_),
      is_named_(num_envs_),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      seeding_(static_cast<Seeding>(nb::cast<int>(settings["seeding"]))),
      log_limit_(nb::cast<std::uint64_t>(settings["log_limit_bytes"])),
      tracks_episodes_(seeding_ != Seeding::CONTINUE || log_limit_ != 0),
      is_restarting_(num_workers_),
      is_copy_(nb::cast<bool>(settings["copy"])),
      has_episodes_(nb::cast<bool>(settings["episode_stats"])),
      holds_gil_(nb::cast<bool>(settings["holds_gil"])),
      is_batched_(nb::cast<bool>(settings["batched"])),
      lease_bytes_(nb::cast<std::size_t>(settings["lease_bytes"])),
      spin_ns_(nb::cast<std::uint64_t>(settings["spin_ns"])),
      encoder_(nb::object(settings["pickler"]).ptr()),
      make_info_(settings["make_info"]),
      on_dead_(settings["on_dead"]),
      unpickler_(settings["unpickler"]),
      fork_generation_(watch_forks()) {
    envs_.resize(num_envs_);
    for (std::uint32_t i = 0; i < num_envs_; ++i) {
        all_.push_back(i);
        const Seat seat = slab_->seats.at(i);
        envs_[i].server = i;
        envs_[i].done = &slab_->words[seat.worker].done[seat.local];
        envs_[i].fault = &slab_->words[seat.worker].fault[seat.local];
    }
    slab_->pool->hashing.store(log_limit_ != 0, std::memory_order_relaxed);
    book_->pin(0, num_envs_);
    pending_.reserve(num_envs_);
    for (std::uint32_t w = 0; w < num_workers_; ++w) blobs_.emplace_back(slab_->command_fds.at(w), slab_->plan.servers[w].size());
}

void Ledger::attach_inline(nb::object loop) {
    inline_ = nb::cast<Loop*>(loop);
    inline_object_ = std::move(loop);
}

void Ledger::release() {
    is_released_ = true;
    is_closed_.store(true, std::memory_order_release);
    if (!is_in_use_.load(std::memory_order_acquire)) let_go();
}

void Ledger::let_go() {
    inline_ = nullptr;
    inline_object_.reset(), make_info_.reset(), on_dead_.reset(), unpickler_.reset();
    pending_.clear();
    envs_.clear();
    book_.reset();
    slab_.reset();
}

int Ledger::traverse(visitproc visit, void* arg) const {
    Py_VISIT(inline_object_.ptr());
    Py_VISIT(make_info_.ptr());
    Py_VISIT(on_dead_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(encoder_.pickler());
    return 0;
}

void Ledger::close() {
    if (fork_generation_ != fork_count.load() || !slab_) return;
    is_closed_.store(true, std::memory_order_release);
    for (WorkerControl* worker : slab_->workers) {
        worker->stop.store(1, std::memory_order_release);
        ring_worker(*worker);
    }
    ring_pool(*slab_->pool);
}

void Ledger::set_eager(bool is_eager) {
    const InUse in_use(*this);
    slab_->pool->eager.store(is_eager, std::memory_order_relaxed);
}

void Ledger::post_request(std::uint32_t worker) {
    if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool is closed; make a new one");
    WorkerControl& control = *slab_->workers.at(worker);
    control.requests.fetch_add(1, std::memory_order_release);
    ring_worker(control);
}

// ---- commands ---------------------------------------------------------------------------------------------------

nb::object Ledger::step(nb::handle actions) {
    const InUse in_use(*this);
    check_idle(all_, false);
    std::vector<nb::list> opaques;
    write_actions(actions, all_, opaques);
    dispatch(all_, Command::STEP);
    if (wait_ids(pending_, num_envs_, nb::handle()) != WaitResult::READY) return nb::none();
    return collect_all();
}

void Ledger::send(nb::handle actions, nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    check_idle(ids, false);
    std::vector<nb::list> opaques;
    write_actions(actions, ids, opaques);
    dispatch(ids, Command::STEP);
}

// seeds: a list of int | None per env; blobs: a list of (seed, options, None) | None per env.
void Ledger::send_reset(nb::handle env_ids, nb::handle seeds, nb::handle blobs) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    check_idle(ids, true);
    check_workers(ids);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const Seat seat = slab_->seats[envs_[ids[i]].server];
        ServerWords& words = slab_->words[seat.worker];
        words.flags[seat.local] = 0;
        nb::object seed = seeds[i], blob = blobs[i];
        if (!seed.is_none()) {
            words.seed[seat.local] = nb::cast<std::uint64_t>(seed);
            words.flags[seat.local] |= FLAG_SEED;
        }
        envs_[ids[i]].log.blob = blob.is_none() ? nb::object() : blob;
        if (!blob.is_none()) write_blob(ids[i], blob.ptr());
    }
    dispatch(ids, Command::RESET);
}

const Ledger::Ids& Ledger::parse_ids(nb::handle env_ids, Ids& storage) const {
    if (!env_ids.is_valid() || env_ids.is_none()) return all_;
    nb::object array = nb::steal(PyArray_FROM_O(env_ids.ptr()));
    if (!array) throw nb::python_error();
    auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
    const bool is_integer = PyArray_ISINTEGER(source) || PyArray_SIZE(source) == 0;
    if (PyArray_NDIM(source) != 1 || !is_integer) raise(errors().usage, "env_ids must be a list or array of integers, one per env");
    array = nb::steal(PyArray_FROM_OTF(array.ptr(), NPY_INT64, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    if (!array) throw nb::python_error();
    source = reinterpret_cast<PyArrayObject*>(array.ptr());
    const auto* ids = static_cast<const std::int64_t*>(PyArray_DATA(source));
    const auto num = static_cast<std::size_t>(PyArray_SIZE(source));
    std::fill(is_named_.begin(), is_named_.end(), std::uint8_t{0});
    for (std::size_t i = 0; i < num; ++i) {
        if (ids[i] < 0 || ids[i] >= static_cast<std::int64_t>(num_envs_)) {
            raise(errors().usage, "env id " + std::to_string(ids[i]) + " does not exist; this pool has envs 0 to " + std::to_string(num_envs_ - 1));
        }
        const auto id = static_cast<std::uint32_t>(ids[i]);
        if (is_named_[id]++) raise(errors().usage, "env id " + std::to_string(id) + " is named twice; name each env once");
        storage.push_back(id);
    }
    return storage;
}

void Ledger::check_idle(const Ids& ids, bool is_reset) const {
    bool is_good = true;
    for (const std::uint32_t id : ids) is_good &= envs_[id].status == EnvStatus::IDLE || (is_reset && envs_[id].status != EnvStatus::PENDING);
    if (is_good && (is_reset || autoreset_ != Autoreset::DISABLED)) return;
    Ids busy, faulted, fresh, ended;
    for (const std::uint32_t id : ids) {
        if (envs_[id].status == EnvStatus::PENDING) busy.push_back(id);
        if (envs_[id].status == EnvStatus::FAULTED) faulted.push_back(id);
        if (envs_[id].status == EnvStatus::NEW) fresh.push_back(id);
        if (autoreset_ == Autoreset::DISABLED && !is_batched_ && (slab_->terminated()[row_of(id)] || slab_->truncated()[row_of(id)])) ended.push_back(id);
    }
    if (!busy.empty()) raise_busy(busy);
    if (is_reset) return;
    if (!faulted.empty()) raise(errors().usage, "envs " + list_ids(faulted) + " have a fault; bring them back with reset(env_ids=...) or revive() before stepping them");
    if (!fresh.empty()) raise(errors().usage, "envs " + list_ids(fresh) + " were never reset; call reset() before stepping them");
    if (!ended.empty()) raise(errors().usage, "the episodes of envs " + list_ids(ended) + " are over and autoreset is DISABLED; reset them before stepping them");
}

void Ledger::check_workers(const Ids& ids) {
    for (const std::uint32_t id : ids) {
        const std::uint32_t worker = slab_->seats[envs_[id].server].worker;
        if (slab_->workers[worker]->dead.load(std::memory_order_acquire) == 0 || is_restarting_[worker]) continue;
        const nb::object verdict = on_dead_(worker);  // the policy's: an error, what infos say of a restart, or None
        if (verdict.is_none()) continue;     // its commands become faults, and the policy deals with them
        if (PyDict_Check(verdict.ptr())) {
            mark_lost(slab_->plan.servers[worker], verdict);
            continue;
        }
        mark_failed(worker);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(verdict.ptr())), verdict.ptr());
        throw nb::python_error();
    }
}

// An array of `rows` rows of a leaf, in its dtype and C order; a new reference.
nb::object Ledger::plain_actions(const Leaf& leaf, PyObject* value, npy_intp rows) const {
    nb::object array = nb::steal(PyArray_FROM_O(value));
    if (!array) {
        PyErr_Clear();
        raise(errors().usage, "actions for leaf " + leaf.path + " are no array; give an array of shape [num_envs, ...]");
    }
    auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
    std::vector<npy_intp> dims{rows};
    dims.insert(dims.end(), leaf.shape.begin(), leaf.shape.end());
    const bool is_shape = PyArray_NDIM(source) == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), PyArray_DIMS(source));
    if (!is_shape) {
        const std::string got = text_of(array.attr("shape"));
        std::string wanted = std::to_string(dims[0]) + (dims.size() == 1 ? "," : "");
        for (std::size_t i = 1; i < dims.size(); ++i) wanted += ", " + std::to_string(dims[i]);
        raise(errors().usage, "actions for leaf " + leaf.path + " have shape " + got + "; give shape (" + wanted + ")");
    }
    if (PyArray_TYPE(source) == leaf.type_num && PyArray_ISCARRAY_RO(source) && leaf.is_native) return array;
    if (!PyArray_CanCastArrayTo(source, leaf.dtype(), NPY_SAME_KIND_CASTING)) {
        raise(errors().usage, "actions for leaf " + leaf.path + " have dtype " + text_of(array.attr("dtype")) +
                                  "; the action space wants " + text_of(leaf.descr));
    }
    Py_INCREF(leaf.descr.ptr());
    array = nb::steal(PyArray_FromArray(source, leaf.dtype(), NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    if (!array) throw nb::python_error();
    return array;
}

// Checks all, then writes all: a wrong action changes nothing.
void Ledger::write_actions(nb::handle actions, const Ids& ids, std::vector<nb::list>& opaques) {
    check_workers(ids);
    const auto rows = static_cast<npy_intp>(ids.size() * batch_size_);
    std::vector<nb::object> arrays(action_.leaves.size());
    if (action_.num_opaques != 0) opaques.resize(ids.size());
    auto leaf = [&](const Node& node, PyObject* value) {
        const auto index = static_cast<std::size_t>(node.index);
        arrays[index] = plain_actions(action_.leaves[index], value, rows);
        return true;
    };
    auto opaque = [&](const Node&, PyObject* value) {
        nb::object items = nb::steal(PySequence_Fast(value, "actions of a space without a fixed size must be a sequence, one per env"));
        if (!items) return false;
        if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())) != ids.size()) {
            PyErr_Format(PyExc_ValueError, "%zd actions for %zu envs", PySequence_Fast_GET_SIZE(items.ptr()), ids.size());
            return false;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) opaques[i].append(nb::handle(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))));
        return true;
    };
    if (!walk_tree(action_.root, actions.ptr(), "", leaf, opaque)) {
        nb::python_error cause;
        raise(errors().usage, "the actions do not fit the action space: " + text_of(cause.value()));
    }
    for (std::size_t index = 0; index < arrays.size(); ++index) {
        const Column& column = action_.leaves[index].column;
        const auto* source = static_cast<const std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(arrays[index].ptr())));
        const std::size_t env_bytes = column.row_bytes * batch_size_;
        if (is_all(ids)) {
            std::memcpy(slab_->base + column.at(0, 0), source, env_bytes * num_envs_);
            continue;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) std::memcpy(slab_->base + column.at(0, row_of(ids[i])), source + i * env_bytes, env_bytes);
    }
    for (const std::uint32_t id : ids) {
        const Seat seat = slab_->seats[envs_[id].server];
        slab_->words[seat.worker].flags[seat.local] = 0;
    }
    for (std::size_t i = 0; i < opaques.size(); ++i) write_blob(ids[i], nb::make_tuple(nb::none(), nb::none(), opaques[i]).ptr());
}

void Ledger::write_blob(std::uint32_t env_id, PyObject* blob) {
    const Seat seat = slab_->seats[envs_[env_id].server];
    ServerWords& words = slab_->words[seat.worker];
    buffer_.clear();
    if (!encoder_.encode(blob, buffer_)) throw nb::python_error();
    OverflowRef ref;
    const int error = blobs_[seat.worker].write(seat.local, buffer_.data(), buffer_.size(), ref);
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    words.blob_offset[seat.local] = ref.offset;
    words.blob_bytes[seat.local] = ref.size;
    words.blob_generation[seat.local] = ref.generation;
    words.flags[seat.local] |= FLAG_BLOB;
}

// Where results go: never into a slot that a lease holds, never over the env's own newest result.
void Ledger::choose_slots(const Ids& ids) {
    const std::uint32_t num_private = slab_->plan.private_slots;
    const bool is_whole = is_all(ids) && !is_copy_;
    const int common = is_whole ? book_->find_free(num_private) : book_->find_private(num_private);
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        env.target = common >= 0 ? static_cast<std::uint8_t>(common) : static_cast<std::uint8_t>(env.latest == 0 ? 1 : 0);
        book_->pin(env.target);
    }
}

void Ledger::dispatch(const Ids& ids, Command command) {
    choose_slots(ids);
    const auto first = static_cast<std::ptrdiff_t>(pending_.size());
    std::fill(is_touched_.begin(), is_touched_.end(), std::uint8_t{0});
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        env.status = EnvStatus::PENDING;
        pending_.push_back(id);
        if (command == Command::STEP && env.is_lost) cut_short(id);
        if (is_done_early(env, command)) continue;
        const Seat seat = slab_->seats[env.server];
        ServerWords& words = slab_->words[seat.worker];
        const bool is_restored = command == Command::STEP && env.needs_restore;
        if (is_restored) begin_episode(id, words, seat.local);
        words.row[seat.local] = row_of(id);
        words.command[seat.local] = static_cast<std::uint8_t>(is_restored ? Command::RESET : command);
        words.slot[seat.local] = env.target;
        note_command(id, words, seat.local, command);
        is_touched_[seat.worker] = 1;
        // Tickets grow before the doorbell rings: a worker that wakes early must already see its command.
        words.ticket[seat.local].store(++env.ticket, std::memory_order_release);
    }
    if (!is_all(ids)) std::sort(pending_.begin() + first, pending_.end());
    if (inline_ == nullptr) {
        for (std::uint32_t w = 0; w < num_workers_; ++w) {
            if (is_touched_[w]) ring_worker(*slab_->workers[w]);
        }
        for (std::uint32_t w = 0; w < num_workers_; ++w) {
            if (is_touched_[w]) check_deaths_of(w);
        }
    }
}

// A worker that died before its tickets were written was reaped without them: settle them here.
// The reaper writes `dead` and then reads the tickets: because of the fence it sees these, or this sees the death.
void Ledger::check_deaths_of(std::uint32_t worker) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (is_restarting_[worker] || slab_->workers[worker]->dead.load(std::memory_order_seq_cst) == 0) return;
    condemn_worker(*slab_, worker, Fault::DIED);
}

}  // namespace stepmill
