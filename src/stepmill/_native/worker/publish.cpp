// Writes results and faults to the slab; `done` then makes them visible.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string_view>

#include "shared/signals.hpp"
#include "shared/tree_visit.hpp"
#include "worker/loop.hpp"

namespace stepmill {

namespace {

bool is_empty_dict(const nb::object& info) { return !info || (PyDict_CheckExact(info.ptr()) && PyDict_GET_SIZE(info.ptr()) == 0); }

const char* output_phase(bool is_info, bool is_reset) {
    if (is_info) return is_reset ? "info of reset" : "info of step";
    return is_reset ? "output of reset" : "output of step";
}

}  // namespace

void Loop::publish(std::uint32_t local, std::uint32_t ticket, Result& result) {
    if (!claim(local, ticket)) return;  // aborted: the row may belong to another worker by now
    if (!write_result(local, result)) {
        const bool is_reset = get_command(words_, local) == Command::RESET;
        publish_fault(local, ticket, Fault::BAD_OUTPUT, output_phase(result.has_bad_info, is_reset), true);
        return;
    }
    complete(local, ticket);
}

// Publishes a result that was written without a fault.
void Loop::complete(std::uint32_t local, std::uint32_t ticket) {
    words_.fault[local].store(static_cast<std::uint32_t>(Fault::NONE), std::memory_order_relaxed);
    finish(local, ticket);
}

void Loop::finish(std::uint32_t local, std::uint32_t ticket) {
    // The release store makes every byte above visible to a thread that reads done == ticket.
    words_.done[local].store(ticket, std::memory_order_release);
    if (is_inline_) return;  // no thread waits
    ++group_;
    if (pool_->own.eager.load(std::memory_order_relaxed) != 0) flush();
}

void Loop::flush() {
    if (group_ == 0) return;
    const std::uint32_t group = group_;
    group_ = 0;
    count_results(*pool_, group);
}

bool Loop::write_result(std::uint32_t local, Result& result) {
    const std::uint32_t row = words_.row[local];
    put(words_.result[local], {});
    put(words_.payload_bytes[local], {});
    if (objects_) objects_of(local).reset();
    if (!check_info(result)) return false;
    nb::object opaques;
    if (obs_.num_opaques != 0) opaques = nb::list();
    return write_obs(result.obs.ptr(), row, words_.slot[local], opaques) && write_rest(local, row, result, opaques);
}

// Writes all of a result but its observation.
bool Loop::write_rest(std::uint32_t local, std::uint32_t row, Result& result, const nb::object& opaques) {
    ServedEnv& served = envs_[local];
    if (result.has_final) {
        write_final_obs(row, result);
        words_.result[local] |= RESULT_FINAL;
    }
    if (!info_.leaves.empty() && !write_info(row, result)) return false;
    if (!(is_batched_ ? write_batched_flags(local, row, result) : write_flags(local, row, result))) return false;
    if (pool_->own.hashing.load(std::memory_order_relaxed) != 0) write_hash(local, row);
    const bool is_last = (words_.flags[local] & FLAG_LAST) != 0;
    served.needs_reset = !is_batched_ && !is_last && !result.has_final && *slab_->over(row) != 0;
    if (is_empty_dict(result.info) && !result.has_final && obs_.num_opaques == 0) return true;
    return write_payload(local, result, opaques);
}

// Writes [opaques, final opaques,] then, unless both are empty, the info and the last info of an episode that ended.
bool Loop::write_payload(std::uint32_t local, Result& result, const nb::object& opaques) {
    PyObject* objects = result.final_objects.release().ptr();
    auto encode = [&](const nb::object& part, const char* name) { return encoder_.encode(part.ptr(), buffer_, {name, objects_ ? &objects : nullptr}); };
    auto encode_info = [&] {
        if (is_empty_dict(result.info) && !result.has_final) return true;
        const bool is_encoded = encode(result.info, "info");
        result.has_bad_info = !is_encoded && PyErr_ExceptionMatches(PyExc_TypeError);
        buffer_.insert(buffer_.end(), result.final_info.begin(), result.final_info.end());
        return is_encoded;
    };
    buffer_.clear();
    const std::uint64_t num_pickled = encoder_.num_pickled();
    auto add_to_hash = [&] {
        if (pool_->own.hashing.load(std::memory_order_relaxed) == 0 || encoder_.num_pickled() != num_pickled) return true;
        const std::string_view bytes(reinterpret_cast<const char*>(buffer_.data()), buffer_.size());
        words_.hash[local] = static_cast<ObsHash>(words_.hash[local] ^ std::hash<std::string_view>()(bytes));
        return true;
    };
    auto add_final = [&] {
        buffer_.insert(buffer_.end(), result.final_opaques.begin(), result.final_opaques.end());
        return result.has_final || encode(nb::list(), OBS_PART);
    };
    bool is_done = !opaques || (encode(opaques, OBS_PART) && add_to_hash() && add_final());
    is_done = is_done && encode_info();
    if (objects != nullptr) objects_of(local) = nb::steal(objects);
    return is_done && payloads_.write(local, buffer_);
}

// A hash of the observation for replays: multiplies 16 bytes at a time (as wyhash does), in four lanes that the CPU computes in
// parallel.
void Loop::write_hash(std::uint32_t local, std::uint32_t row) {
    constexpr std::uint64_t SALT = 0x9e3779b97f4a7c15u;
    constexpr std::ptrdiff_t PIECE = 16;
    std::array<std::uint64_t, 4> lanes{0xff51afd7ed558ccdu, 0xc4ceb9fe1a85ec53u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu};
    auto mix = [](std::uint64_t& lane, const std::byte* bytes, std::size_t size) {
        std::array<std::uint64_t, 2> words{};
        std::memcpy(words.data(), bytes, size);
        const auto product = static_cast<unsigned __int128>(lane ^ words[0]) * (SALT ^ words[1]);
        lane = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    };
    bool is_wide = false;
    for (std::size_t index = 0; index < obs_.leaves.size(); ++index) {
        const Leaf& leaf = obs_.leaves[index];
        const std::byte* bytes = slab_->base + obs_at(leaf, index, row, words_.slot[local]);
        const std::byte* const end = bytes + leaf.row_bytes * batch_size_;
        is_wide |= end - bytes >= 4 * PIECE;
        for (; end - bytes >= 4 * PIECE; bytes += 4 * PIECE) {
            for (std::ptrdiff_t lane = 0; lane < 4; ++lane) mix(lanes[static_cast<std::size_t>(lane)], bytes + PIECE * lane, PIECE);
        }
        for (; end - bytes >= PIECE; bytes += PIECE) mix(lanes[0], bytes, PIECE);
        if (bytes != end) mix(lanes[0], bytes, static_cast<std::size_t>(end - bytes));
    }
    for (std::size_t lane = 1; is_wide && lane < 4; ++lane) mix(lanes[0], reinterpret_cast<const std::byte*>(&lanes[lane]), sizeof lanes[lane]);
    put(words_.hash[local], static_cast<ObsHash>(lanes[0]));
}

std::size_t Loop::obs_at(const Leaf& leaf, std::size_t index, std::uint32_t row, std::uint32_t slot) const {
    const std::uint32_t num_rows = slab_->plan.num_rows;
    return row < num_rows ? leaf.column.at(slot, row) : slab_->plan.staging[index].at(0, row - num_rows);
}

bool Loop::write_obs(PyObject* obs, std::uint32_t row, std::uint32_t slot, const nb::object& opaques) {
    const npy_intp rows = is_batched_ ? static_cast<npy_intp>(batch_size_) : 0;
    const SlabPlan& plan = slab_->plan;
    const bool is_staged = row >= plan.num_rows;
    const Column* columns = (is_staged ? plan.staging : plan.observation).data();
    const std::uint32_t column_row = is_staged ? row - plan.num_rows : row, column_slot = is_staged ? 0 : slot;
    const Leaf* leaves = obs_.leaves.data();
    std::byte* const base = slab_->base;
    auto write = [=](const Node& node, PyObject* value) {
        std::byte* target = base + columns[node.index].at(column_slot, column_row);
        const Leaf& leaf = leaves[node.index];
        return (rows == 0 && write_scalar(leaf, value, target)) || write_leaf(leaf, value, target, rows);
    };
    if (obs_.root.kind == Node::Kind::LEAF) return write(obs_.root, obs);
    return visit_tree(obs_.root, obs, write, [&](const Node&, PyObject* value) { return PyList_Append(opaques.ptr(), value) == 0; });
}

void Loop::write_final_obs(std::uint32_t row, const Result& result) {
    const std::uint8_t* value = result.final_obs.data();
    for (std::size_t index = 0; index < obs_.leaves.size(); value += obs_.leaves[index++].row_bytes) {
        std::memcpy(slab_->base + final_columns_[index].at(0, row), value, obs_.leaves[index].row_bytes);
    }
}

// Publishes the current exception as a fault. Always publishes, and leaves no exception set. On the serial backend, an exception of the
// learner's signal handlers is saved for raise_interrupt(), even if it is raised while the record is made.
void Loop::publish_fault(std::uint32_t local, std::uint32_t ticket, Fault fault, const char* phase, bool is_claimed) {
    nb::object raised = nb::steal(PyErr_Occurred() ? raised_exception() : nullptr);
    if (is_inline_ && raised && is_from_signal(raised)) {
        interrupt_ = raised;
        fault = Fault::INTERRUPTED;
    }
    if (!is_claimed && !claim(local, ticket)) return;
    words_.clear_result(local);
    write_record(local, raised ? nb::handle(raised) : nb::handle(Py_None), phase);
    envs_[local].needs_reset = autoreset_ == Autoreset::NEXT_STEP && !is_batched_ && !(words_.flags[local] & FLAG_LAST);
    words_.fault[local].store(static_cast<std::uint32_t>(fault), std::memory_order_relaxed);
    finish(local, ticket);
}

// Writes the fault record. If that fails, the fault has no text. If a signal handler of the learner raised meanwhile, tries again.
void Loop::write_record(std::uint32_t local, nb::handle cause, const char* phase) {
    constexpr int MAX_ATTEMPTS = 4;
    for (int attempt = 0; attempt < MAX_ATTEMPTS; ++attempt) {
        const nb::object record = nb::steal(PyObject_CallFunction(describe_.ptr(), "Os", cause.ptr(), phase));
        buffer_.clear();
        if (record && encoder_.encode(record.ptr(), buffer_) && payloads_.write(local, buffer_)) return;
        const nb::object failure = nb::steal(raised_exception());
        if (!is_inline_ || !is_from_signal(failure)) return;
        interrupt_ = failure;
    }
}

void Loop::raise_interrupt() {
    if (!interrupt_) return;
    const nb::object interrupt = std::move(interrupt_);
    interrupt_.reset();
    set_exception(interrupt.ptr());
    throw nb::python_error();
}

}  // namespace stepmill
