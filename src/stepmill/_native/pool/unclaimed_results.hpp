// Results that the pool has received but that may not have reached the user: a signal handler can raise at any point of Python code, also
// when a native call returns, and the returned batch is then lost.
#pragma once

#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

namespace stepmill {

namespace nb = nanobind;

// The payloads of a batch. Lists of tuples that begin with a row; null: empty.
struct Payloads {
    nb::object infos;   // (row, payload, fault, objects)
    nb::object finals;  // (row, observation)
    bool is_by_env = false;  // rows count all envs, not only those of the batch
};

// The last batch, until the pool confirms it; and the results of lost batches, until they are received again. The rows of these envs do
// not change, since they get no commands meanwhile. Used by the pool's thread, with the GIL.
class UnclaimedResults {
   public:
    using Ids = std::vector<std::uint32_t>;
    struct Batch {
        Ids ids;
        Payloads payloads;
        bool has_payloads = false;  // false: they can still be gathered
    };

    explicit UnclaimedResults(std::uint32_t num_envs) : results_(num_envs) { flag_.append(false); }

    nb::list flag() const { return flag_; }  // [bool]: set when a batch is received, cleared by the pool when it has the batch
    void remember(const Ids& ids, Payloads payloads, bool has_payloads) {
        last_.ids = ids;
        last_.payloads = std::move(payloads);
        last_.has_payloads = has_payloads;
        PyList_SetItem(flag_.ptr(), 0, Py_NewRef(Py_True));
    }
    const Batch& last() const noexcept { return last_; }
    Batch pop_last() { return std::exchange(last_, Batch()); }
    void forget(bool is_all) { last_ = {is_all ? Ids() : std::move(last_.ids), {}, false}; }  // those of `ids` can be gathered again

    // Stores the results of a lost batch.
    void store(const Batch& batch, std::size_t batch_size) {
        for (const std::uint32_t id : batch.ids) {
            results_[id].is_unclaimed = true;
            ids_.push_back(id);
        }
        auto record_of = [&](nb::handle item) -> Result& {
            const std::size_t place = nb::cast<std::size_t>(item[0]) / batch_size;
            return results_.at(batch.payloads.is_by_env ? place : batch.ids.at(place));
        };
        for (nb::handle item : batch.payloads.infos ? batch.payloads.infos : nb::list()) {
            record_of(item).payload = nb::steal(PyTuple_GetSlice(item.ptr(), 1, PyTuple_GET_SIZE(item.ptr())));
        }
        for (nb::handle item : batch.payloads.finals ? batch.payloads.finals : nb::list()) record_of(item).final_obs = item[1];
    }
    void put(std::uint32_t id, nb::object payload, nb::object final_obs) {  // None: null
        results_[id] = {true, payload.is_none() ? nb::object() : std::move(payload), final_obs.is_none() ? nb::object() : std::move(final_obs)};
        ids_.push_back(id);
    }
    bool is_any() const noexcept { return !ids_.empty(); }
    bool is_unclaimed(std::uint32_t id) const { return is_any() && results_[id].is_unclaimed; }
    const Ids& ids() const noexcept { return ids_; }
    const nb::object& payload(std::uint32_t id) const { return results_[id].payload; }      // without the row; null: none
    const nb::object& final_obs(std::uint32_t id) const { return results_[id].final_obs; }  // null: none
    void release(std::uint32_t id) {  // received again, or dropped
        if (!is_unclaimed(id)) return;
        results_[id] = {};
        std::erase(ids_, id);
    }

    void clear() {
        last_ = Batch();
        results_.clear(), ids_.clear();
    }
    int traverse(visitproc visit, void* arg) const {
        Py_VISIT(last_.payloads.infos.ptr());
        Py_VISIT(last_.payloads.finals.ptr());
        return 0;
    }

   private:
    struct Result {
        bool is_unclaimed = false;
        nb::object payload, final_obs;
    };

    nb::list flag_;
    Batch last_;
    std::vector<Result> results_;  // by env
    Ids ids_;                 // of the unclaimed results
};

}  // namespace stepmill
