// Objects that cannot be pickled: pools whose envs run in the learner's process pass them by reference.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>

namespace stepmill {

namespace nb = nanobind;

// The objects that the newest payload of each server refers to: a list, or null. The pool state creates and clears the table; a loop in
// the same process finds it by its slab and fills it. An entry lives until the server's next result. Guarded by the GIL.
class LocalObjects {
   public:
    static std::shared_ptr<LocalObjects> make(std::uint64_t slab_id, std::size_t num_servers);
    static std::shared_ptr<LocalObjects> find(std::uint64_t slab_id);  // null: the pool is in another process

    nb::object& of(std::uint32_t server) { return lists_.at(server); }
    void clear() {
        for (nb::object& list : lists_) list.reset();
    }
    int traverse(visitproc visit, void* arg) const;

   private:
    explicit LocalObjects(std::size_t num_servers) : lists_(num_servers) {}

    std::vector<nb::object> lists_;
};

}  // namespace stepmill
