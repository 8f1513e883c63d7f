#define NO_IMPORT_ARRAY
#include "ledger.hpp"
#include "finalization.hpp"
#include "forks.hpp"

#include <algorithm>

namespace stepmill {

namespace {

std::vector<Journal::Kind> action_kinds(const Tree& tree, std::uint32_t batch_size) {
    std::vector<Journal::Kind> kinds;
    for (const Leaf& leaf : tree.leaves) kinds.push_back({leaf.row_bytes * batch_size, leaf.type_num == NPY_INT64 && leaf.is_native});
    return kinds;
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
    // A daemon thread whose pool was closed because the program ends has done nothing wrong. SystemExit ends it in silence.
    if (&error == &errors().closed && is_left_over()) PyErr_SetNone(PyExc_SystemExit);
    else PyErr_SetString(error.ptr(), text.c_str());
    throw nb::python_error();
}

Errors& errors() {
    static Errors* const classes = new Errors;  // lives as long as the interpreter: errors are raised until the very end
    return *classes;
}

Ledger::Ledger(std::shared_ptr<Slab> slab, nb::dict settings)
    : slab_(std::move(slab)),
      book_(std::make_shared<SlotBook>(*slab_)),
      num_envs_(nb::cast<std::uint32_t>(settings["num_envs"])),
      batch_size_(slab_->plan.batch_size),
      num_workers_(static_cast<std::uint32_t>(slab_->workers.size())),
      obs_(Tree::parse(settings["observation"], settings["observation_leaves"], slab_->plan.observation)),
      action_(Tree::parse(settings["action"], settings["action_leaves"], slab_->plan.action)),
      info_(Tree::parse(settings["info"], settings["info_leaves"], slab_->plan.info)),
      reward_(parse_leaf(settings["reward"], slab_->plan.outcome.reward)),
      terminated_(parse_leaf(settings["flag"], slab_->plan.outcome.terminated)),
      truncated_(parse_leaf(settings["flag"], slab_->plan.outcome.truncated)),
      alive_(parse_leaf(settings["flag"], slab_->plan.outcome.alive)),
      over_(parse_leaf(settings["over"], slab_->plan.over)),
      episode_return_(parse_leaf(settings["episode_return"], slab_->plan.outcome.episode_return)),
      episode_length_(parse_leaf(settings["episode_length"], slab_->plan.episode_length)),
      is_touched_(num_workers_),
      is_named_(num_envs_),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      seeding_(static_cast<Seeding>(nb::cast<int>(settings["seeding"]))),
      log_limit_(nb::cast<std::uint64_t>(settings["log_limit_bytes"])),
      journal_(num_envs_, action_kinds(action_, batch_size_), log_limit_),
      rewards_(num_envs_),
      hashes_(num_envs_),
      flags_(num_envs_),
      budget_(nb::cast<std::uint64_t>(settings["num_episodes"])),
      tracks_episodes_(seeding_ != Seeding::CONTINUE || log_limit_ != 0),
      is_plain_(slab_->plan.outcome.is_plain()),
      is_restarting_(num_workers_),
      num_posted_(num_workers_),
      is_copy_(nb::cast<bool>(settings["copy"])),
      has_episodes_(nb::cast<bool>(settings["episode_stats"])),
      holds_gil_(nb::cast<bool>(settings["holds_gil"])),
      is_batched_(nb::cast<bool>(settings["batched"])),
      lease_bytes_(slab_->plan.lease_bytes),
      spin_ns_(nb::cast<std::uint64_t>(settings["spin_ns"])),
      encoder_(nb::object(settings["pickler"]).ptr()),
      make_info_(settings["make_info"]),
      describe_unreadable_(settings["describe_unreadable"]),
      unpickler_(settings["unpickler"]),
      objects_(LocalObjects::make(slab_->id, slab_->seats.size())),
      fork_generation_(watch_forks()) {
    unclaimed_.append(false);
    form_ = {obs_.root, nb::object(), std::vector<std::vector<std::byte>>(obs_.leaves.size())};
    envs_.resize(num_envs_);
    ended_.resize(std::size_t{num_envs_} * batch_size_);
    servers_.resize(slab_->seats.size());
    num_spares_ = static_cast<std::uint32_t>(servers_.size()) - num_envs_;
    for (std::uint32_t server = num_envs_; server < servers_.size(); ++server) {
        servers_[server].env = NO_ENV;
        queue_.push_back(server);
    }
    for (std::uint32_t i = 0; i < num_envs_; ++i) {
        all_.push_back(i);
        attach(i, i);
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

void Ledger::attach_helper(nb::object helper) { helper_ = std::move(helper); }

void Ledger::release() {
    is_released_ = true;
    is_closed_.store(true, std::memory_order_release);
    if (!is_in_use_.load(std::memory_order_acquire)) let_go();
}

void Ledger::let_go() {
    inline_ = nullptr;
    reaper_ = nullptr;
    inline_object_.reset(), helper_.reset(), make_info_.reset(), describe_unreadable_.reset(), unpickler_.reset(), reaper_object_.reset();
    form_.wrap.reset();
    objects_->clear();
    pending_.clear(), kept_.clear();
    handout_ = Handout();
    envs_.clear();
    book_.reset();
    slab_.reset();
}

int Ledger::traverse(visitproc visit, void* arg) const {
    Py_VISIT(inline_object_.ptr());
    Py_VISIT(helper_.ptr());
    Py_VISIT(make_info_.ptr());
    Py_VISIT(describe_unreadable_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(form_.wrap.ptr());
    Py_VISIT(encoder_.pickler());
    Py_VISIT(handout_.payloads.infos.ptr());
    Py_VISIT(handout_.payloads.finals.ptr());
    return objects_->traverse(visit, arg);
}

std::uint32_t Ledger::server_of(std::uint32_t env_id) const {
    if (envs_.empty()) raise(errors().closed, "the pool is closed; make a new one");
    return env_id < num_envs_ ? envs_.at(env_id).server : queue_.at(env_id - num_envs_);
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
    control.requests.store(++num_posted_[worker], std::memory_order_release);
    ring_worker(control);
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

}  // namespace stepmill
