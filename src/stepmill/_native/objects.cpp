#include "objects.hpp"

#include <map>

#include <unistd.h>

namespace stepmill {

namespace {

struct Entry {
    pid_t pid;  // a forked child has a copy of the table, which belongs to no pool there
    std::weak_ptr<LocalObjects> objects;
};

std::map<std::uint64_t, Entry>& entries() {
    static auto* const entries = new std::map<std::uint64_t, Entry>;  // never freed: pools may be closed at the end of the process
    return *entries;
}

}  // namespace

std::shared_ptr<LocalObjects> LocalObjects::make(std::uint64_t slab_id, std::size_t num_servers) {
    std::erase_if(entries(), [](const auto& entry) { return entry.second.objects.expired(); });
    std::shared_ptr<LocalObjects> made(new LocalObjects(num_servers));
    entries()[slab_id] = {getpid(), made};
    return made;
}

std::shared_ptr<LocalObjects> LocalObjects::find(std::uint64_t slab_id) {
    const auto entry = entries().find(slab_id);
    return entry != entries().end() && entry->second.pid == getpid() ? entry->second.objects.lock() : nullptr;
}

int LocalObjects::traverse(visitproc visit, void* arg) const {
    for (const nb::object& list : lists_) Py_VISIT(list.ptr());
    return 0;
}

}  // namespace stepmill
