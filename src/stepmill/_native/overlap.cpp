// Overlapped resets: a worker with nothing else to do begins the next episode before anybody asks for it.
#define NO_IMPORT_ARRAY
#include "loop.hpp"

namespace stepmill {

// With nothing else to do: begins the next episode of one env that ended its last. False if there is none.
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
        control_->env_ns.store(control_->env_ns.load(std::memory_order_relaxed) + now_ns() - began, std::memory_order_relaxed);
        return true;
    }
    return false;
}

// Whether an explicit reset asks for the very episode that was begun early.
bool Loop::is_of_early(std::uint32_t local) const {
    const ServedEnv& served = envs_[local];
    if (words_.flags[local] == 0) return true;
    const bool is_named = words_.flags[local] == (FLAG_SEED | FLAG_EPISODE);
    return is_named && served.has_seed && words_.seed[local] == served.base_seed && words_.episode[local] == served.episode;
}

// What came of the early reset is the result of the command that asks for it, a fault too.
bool Loop::take_early(std::uint32_t local, Result& result, const char*& phase) {
    ServedEnv& served = envs_[local];
    served.is_early = false;
    if (served.early_error) {
        phase = served.early_phase;
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(served.early_error.ptr())), served.early_error.ptr());
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

// A call came between two episodes. Where episodes are logged it comes before the next, whether that has begun ahead or not:
// that is begun again.
void Loop::begin_again(std::uint32_t local) {
    ServedEnv& served = envs_.at(local);
    if (served.is_early && pool_->hashing.load(std::memory_order_relaxed) != 0) drop_early(served);
}

// Another episode was begun, by the options of old, than the next reset is to begin.
void Loop::keep_options(std::uint32_t local, nb::handle options) {
    ServedEnv& served = envs_.at(local);
    served.has_options = !options.is_none();
    served.options.clear();
    if (served.is_early) drop_early(served);
    if (!served.has_options) return;
    const auto* data = reinterpret_cast<const std::uint8_t*>(PyBytes_AsString(options.ptr()));
    if (data == nullptr) throw nb::python_error();
    served.options.assign(data, data + PyBytes_GET_SIZE(options.ptr()));
}

nb::object Loop::kept_options(const ServedEnv& served) const { return nb::steal(decode(served.options.data(), served.options.size(), {unpickler_.ptr(), nullptr})); }

void Loop::drop_early(ServedEnv& served) const {
    if (served.has_seed && seeding_ != Seeding::CONTINUE) --served.episode;  // nobody saw it
    served.is_early = false;
    served.early_obs.reset(), served.early_info.reset(), served.early_error.reset();
}

}  // namespace stepmill
