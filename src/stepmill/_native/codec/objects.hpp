// Objects that cannot be pickled: pools whose envs run in the learner's process pass them by reference.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <unistd.h>

#include <nanobind/nanobind.h>

namespace stepmill {

namespace nb = nanobind;

// The objects that the newest payload of each server refers to: a list, or null. The pool state creates and clears the table; a loop in
// the same process finds it by its slab and fills it. An entry lives until the server's next result. Guarded by the GIL.
class LocalObjects {
   public:
    static std::shared_ptr<LocalObjects> make(std::uint64_t slab_id, std::size_t num_servers) {
        std::erase_if(entries(), [](const auto& entry) { return entry.second.objects.expired(); });
        std::shared_ptr<LocalObjects> made(new LocalObjects(num_servers));
        entries()[slab_id] = {getpid(), made};
        return made;
    }

    // Null: the pool is in another process.
    static std::shared_ptr<LocalObjects> find(std::uint64_t slab_id) {
        const auto entry = entries().find(slab_id);
        return entry != entries().end() && entry->second.pid == getpid() ? entry->second.objects.lock() : nullptr;
    }

    nb::object& of(std::uint32_t server) { return lists_.at(server); }
    void clear() {
        for (nb::object& list : lists_) list.reset();
    }
    int traverse(visitproc visit, void* arg) const {
        for (const nb::object& list : lists_) Py_VISIT(list.ptr());
        return 0;
    }

   private:
    struct Entry {
        pid_t pid;  // a forked child has a copy of the table, which belongs to no pool there
        std::weak_ptr<LocalObjects> objects;
    };

    static std::map<std::uint64_t, Entry>& entries() {
        static auto* const entries = new std::map<std::uint64_t, Entry>;  // never freed: pools may be closed at the end of the process
        return *entries;
    }

    explicit LocalObjects(std::size_t num_servers) : lists_(num_servers) {}

    std::vector<nb::object> lists_;
};

}  // namespace stepmill
