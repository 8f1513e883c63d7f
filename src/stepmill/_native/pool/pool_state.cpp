#define NO_IMPORT_ARRAY
#include "pool/pool_state.hpp"
#include "shared/finalization.hpp"
#include "shared/forks.hpp"
#include "shared/reaper.hpp"

#include <algorithm>

namespace stepmill {

InUse::InUse(PoolState& state, For call) : state_(state) {
    if (state.fork_generation_ != fork_count.load(std::memory_order_relaxed)) {
        raise(errors().usage, "this pool belongs to the process that made it; make a new pool in the forked child");
    }
    if (state.is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool is closed; make a new one");
    if (state.is_in_use_.exchange(true, std::memory_order_acquire)) {
        raise(errors().usage, "the pool is in use by another call; use it from one thread at a time, and not from its own envs or from signal handlers");
    }
    if (call == For::ANY && state.are_records_stale_) state.sync_records();
}

InUse::~InUse() {
    state_.waits_for_replays_ = false;
    state_.is_in_use_.store(false, std::memory_order_release);
    if (state_.is_released_) state_.clear();
}

void raise(const nb::object& error, const std::string& text) {
    // At exit, a daemon thread may find its pool closed, which is not an error of the user. SystemExit ends the thread silently.
    if (&error == &errors().closed && is_left_over()) PyErr_SetNone(PyExc_SystemExit);
    else PyErr_SetString(error.ptr(), text.c_str());
    throw nb::python_error();
}

Errors& errors() {
    static Errors* const classes = new Errors;  // never freed: errors are raised until the interpreter ends
    return *classes;
}

PoolState::PoolState(std::shared_ptr<Slab> slab, nb::dict settings)
    : slab_(std::move(slab)),
      leases_(std::make_shared<SlotLeases>(*slab_)),
      num_envs_(nb::cast<std::uint32_t>(settings["num_envs"])),
      batch_size_(slab_->plan.batch_size),
      num_workers_(static_cast<std::uint32_t>(slab_->lanes.size())),
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
      commands_(*slab_, nb::object(settings["pickler"]).ptr()),
      spares_(*slab_, commands_, num_envs_, static_cast<Seeding>(nb::cast<int>(settings["seeding"]))),
      log_(*slab_, action_, num_envs_, nb::cast<bool>(settings["batched"]), nb::cast<std::uint64_t>(settings["log_limit_bytes"])),
      unclaimed_(num_envs_),
      counted_lives_(num_workers_),
      is_named_(num_envs_),
      autoreset_(static_cast<Autoreset>(nb::cast<int>(settings["autoreset"]))),
      seeding_(static_cast<Seeding>(nb::cast<int>(settings["seeding"]))),
      budget_(nb::cast<std::uint64_t>(settings["num_episodes"])),
      recycle_episodes_(nb::cast<std::uint64_t>(settings["recycle_episodes"])),
      recycle_bytes_(nb::cast<std::uint64_t>(settings["recycle_bytes"])),
      recycles_(recycle_episodes_ != UINT64_MAX || recycle_bytes_ != UINT64_MAX),
      tracks_episodes_(seeding_ != Seeding::CONTINUE || log_.is_on()),
      is_copy_(nb::cast<bool>(settings["copy"])),
      has_episodes_(nb::cast<bool>(settings["episode_stats"])),
      holds_gil_(nb::cast<bool>(settings["holds_gil"])),
      is_batched_(nb::cast<bool>(settings["batched"])),
      lease_bytes_(slab_->plan.lease_bytes),
      spin_ns_(nb::cast<std::uint64_t>(settings["spin_ns"])),
      openmp_(num_workers_),
      make_info_(settings["make_info"]),
      describe_unreadable_(settings["describe_unreadable"]),
      unpickler_(settings["unpickler"]),
      objects_(LocalObjects::make(slab_->id, slab_->server_locations.size())),
      fork_generation_(watch_forks()) {
    format_ = {obs_.root, nb::object(), std::vector<std::vector<std::byte>>(obs_.leaves.size())};
    for (const char* name : EVENT_NAMES) event_types_.push_back(settings["event_types"].attr(name));
    for (const char* name : Decision::NAMES) decision_types_.push_back(settings["event_types"].attr(name));
    view_type_ = settings["event_types"].attr("ServerView");
    for (const auto& [lane, pid] : nb::dict(settings["pids"])) slab_->workers.at(nb::cast<std::size_t>(lane))->learner.pid.store(nb::cast<std::uint32_t>(pid));
    envs_.resize(num_envs_);
    ended_.resize(std::size_t{num_envs_} * batch_size_);
    was_alive_.resize(ended_.size() * slab_->plan.outcome.alive.row_bytes);
    for (std::uint32_t i = 0; i < num_envs_; ++i) {
        all_.push_back(i);
        assign_server(i, i);
    }
    slab_->pool->own.hashing.store(log_.is_on(), std::memory_order_relaxed);
    leases_->pin(0, num_envs_);
    pending_.reserve(num_envs_), suspended_.reserve(num_envs_);
}

// Connects the parts that exist only once the workers run. Null: unchanged.
void PoolState::attach(nb::object loop, nb::object kernel, nb::object advance, std::optional<int> outbox_fd, nb::object reaper) {
    if (!loop.is_none()) commands_.attach_loop(std::move(loop));
    if (!kernel.is_none()) attach_kernel(std::move(kernel));
    if (!advance.is_none()) commands_.attach_advance(std::move(advance));
    if (outbox_fd) commands_.attach_outbox(*outbox_fd);
    if (reaper.is_none()) return;
    reaper_ = nb::cast<Reaper*>(reaper);
    reaper_object_ = std::move(reaper);
}

void PoolState::release() {
    is_released_ = true;
    is_closed_.store(true, std::memory_order_release);
    if (!is_in_use_.load(std::memory_order_acquire)) clear();
}

void PoolState::clear() {
    reaper_ = nullptr;
    kernel_ = nullptr;
    kernel_object_.reset(), make_info_.reset(), describe_unreadable_.reset(), unpickler_.reset(), reaper_object_.reset();
    format_.wrap.reset();
    objects_->clear();
    commands_.clear(), log_.clear(), unclaimed_.clear();
    pending_.clear();
    envs_.clear();
    leases_.reset();
    slab_.reset();
}

int PoolState::traverse(visitproc visit, void* arg) const {
    Py_VISIT(kernel_object_.ptr());
    Py_VISIT(make_info_.ptr());
    Py_VISIT(describe_unreadable_.ptr());
    Py_VISIT(unpickler_.ptr());
    Py_VISIT(format_.wrap.ptr());
    if (const int stopped = commands_.traverse(visit, arg); stopped != 0) return stopped;
    if (const int stopped = unclaimed_.traverse(visit, arg); stopped != 0) return stopped;
    return objects_->traverse(visit, arg);
}

// For calls that may run while another call runs.
void PoolState::check_open() const {
    if (!slab_) raise(errors().closed, "the pool is closed; make a new one");
}

void PoolState::close() {
    if (fork_generation_ != fork_count.load() || !slab_) return;
    is_closed_.store(true, std::memory_order_release);
    for (WorkerControl* worker : slab_->workers) {
        worker->learner.stop.store(1, std::memory_order_release);
        ring_worker(*worker);
    }
    ring_pool(*slab_->pool);
}

void PoolState::post_request(std::uint32_t lane) {
    if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool is closed; make a new one");
    commands_.post_request(lane);
}

const PoolState::Ids& PoolState::parse_ids(nb::handle env_ids, Ids& storage) const {
    if (!env_ids.is_valid() || env_ids.is_none()) return all_;
    nb::object array = checked(PyArray_FROM_O(env_ids.ptr()));
    auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
    bool is_integer = PyArray_ISINTEGER(source) || PyArray_SIZE(source) == 0;
    const bool is_list = PyList_Check(env_ids.ptr()) || PyTuple_Check(env_ids.ptr());  // NumPy makes integers of [True, 2]
    for (Py_ssize_t i = 0; is_list && i < PySequence_Fast_GET_SIZE(env_ids.ptr()); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(env_ids.ptr(), i);
        is_integer = is_integer && !PyBool_Check(item) && !PyArray_IsScalar(item, Bool);
    }
    if (PyArray_NDIM(source) != 1 || !is_integer) raise(errors().usage, "env_ids must be a list or array of integers, one per env; name the envs of a mask by number: np.flatnonzero(mask)");
    array = checked(PyArray_FROM_OTF(array.ptr(), NPY_INT64, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
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

// ---- spares -----------------------------------------------------------------------------------------------------

// Makes `server` serve this env from now on. The phase of the previous env object is forgotten.
void PoolState::assign_server(std::uint32_t id, std::uint32_t server) {
    EnvRecord& env = envs_[id];
    const ServerLocation location = slab_->server_locations.at(server);
    env.server = server;
    env.ticket = &commands_.ticket(server);
    env.done = &slab_->words[location.worker].done[location.local];
    env.fault = &slab_->words[location.worker].fault[location.local];
    log_.set_server(id, location);
    envs_.move(id, ObjectPhase::CURRENT);
    env.lost_info.reset();
}

// Every env is served by the server of its number again.
void PoolState::reset_server_order() {
    spares_.reset_server_order();
    for (const std::uint32_t id : all_) {
        const bool is_same = envs_[id].server == id;
        const bool begins_episode_next = envs_[id].begins_episode_next();
        assign_server(id, id);
        if (is_same && begins_episode_next) envs_.move(id, ObjectPhase::RENEWED);
        if (!is_same && envs_[id].phase() == EnvPhase::IDLE) envs_.move(id, EnvPhase::NEW);  // in case its reset is not sent: the new server is in another episode
    }
    scanned_ = 0;
}

bool PoolState::is_over(std::uint32_t id) const {
    if (!spares_.has_spares() || envs_[id].phase() == EnvPhase::EXHAUSTED || autoreset_ == Autoreset::SAME_STEP || (is_batched_ && autoreset_ == Autoreset::DISABLED)) return false;
    return have_all_ended(id);  // a batched env is replaced as a whole
}

// Replaces the server of an env whose last result ended its episode.
void PoolState::swap_in_spare(std::uint32_t id) {
    flush_deferred_resets();
    assign_server(id, spares_.swap_in(envs_[id].server));
}

void PoolState::flush_deferred_resets() {
    if (!spares_.has_deferred()) return;
    spares_.flush_deferred_resets([&](std::uint32_t id) { return envs_[id].phase() == EnvPhase::IDLE || envs_[id].phase() == EnvPhase::NEW; });
}

// The command of the env asks for the staged episode. Nothing is written: the result exists already, or its reset is outstanding.
void PoolState::use_staged(std::uint32_t id) {
    EnvRecord& env = envs_[id];
    const ResetSeed staged = spares_.use_staged(env.server);
    env.command.source = Source::STAGING_ROW;
    env.command.begins = Begins::EPISODE;
    envs_.move(id, ObjectPhase::CURRENT);
    env.has_seed = staged.has_seed;
    ++slab_->env_counters(id).num_spares;
    env.base_seed = staged.seed;
    env.episode = 0;
    env.reset_blob.reset();
}

void PoolState::discard_staged(std::uint32_t id) {
    envs_[id].command.source = Source::OWN_ROW;
    spares_.discard_staged(envs_[id].server);
}

void PoolState::release_staged(nb::handle env_ids, bool is_whole) {
    const InUse in_use(*this);
    if (is_whole) reset_server_order();
    flush_deferred_resets();
    Ids storage, ids;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (!spares_.is_staged(envs_[id].server) || envs_[id].phase() == EnvPhase::PENDING || unclaimed_.is_unclaimed(id)) continue;
        envs_[id].command.source = Source::STAGING_ROW;
        ids.push_back(id);
    }
    dispatch(ids, Command::RESET);
}

}  // namespace stepmill
